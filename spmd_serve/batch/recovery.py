"""What of an output and its records is intact after a crash, or after somebody has edited the output."""

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from spmd_serve.batch.records import RECORD_SIZE, Record

_RECORDS_AT_A_TIME = 4096


@dataclass
class Found:
    """The first `records` records account for the output's first `end` bytes; then what else there is."""

    records: int = 0
    end: int = 0
    moved: list[tuple[Record, int]] = field(default_factory=list)
    """Intact answers behind damage, with their offsets: keeping them takes a rewrite."""
    lost: int = 0
    """Records whose answer is gone."""
    dropped: int = 0
    """Bytes of the output that no record accounts for."""


def read_records(state: int, start: int) -> Iterator[tuple[int, Record]]:
    """Index and content of each intact record of a state file whose records begin at byte `start`."""
    index = 0
    while data := os.pread(state, _RECORDS_AT_A_TIME * RECORD_SIZE, start + index * RECORD_SIZE):
        for offset in range(0, len(data), RECORD_SIZE):
            record = Record.unpack(data[offset : offset + RECORD_SIZE])
            if record is not None:
                yield index, record
            index += 1


def inspect(output: BinaryIO, records: Iterator[tuple[int, Record]], note: Callable[[Record], bool]) -> Found:
    """Compare an output with its records; `note` is called for each answer found, and says whether it is new.

    In step as long as both agree, which is all of it after most crashes; then by content. Only in the second
    case does it hold what is left of the records in memory.
    """
    found = Found()
    rest: list[Record] = []
    output.seek(0)
    for index, record in records:
        if index != found.records or not record.fits(output.read(record.length)) or not note(record):
            rest = [record, *(record for _, record in records)]
            break
        found.records += 1
        found.end += record.length
    wanted = {(record.length, record.crc): record for record in rest}
    output.seek(found.end)
    offset = found.end
    for line in output:
        match = wanted.pop((len(line), zlib.crc32(line)), None)
        if match is not None and note(match):
            found.moved.append((match, offset))
        else:
            found.dropped += len(line)
        offset += len(line)
    found.lost = len(rest) - len(found.moved)
    return found
