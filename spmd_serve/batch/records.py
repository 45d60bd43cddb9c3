"""Binary format of ``out.jsonl.state``: the holder, the header, and one record per finished answer.

- bytes 0 to 512: the holder: JSON, padded with spaces; rewritten by every run
- then the header: JSON, its CRC-32 in hex, a newline; written once
- then records of 32 bytes, in the order of the lines of ``out.jsonl``
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from spmd_serve.batch.source import InputFingerprint

FORMAT = 1
HOLDER_SIZE = 512
RECORD_SIZE = 32
MAX_ANSWER_BYTES = 0xFFFF_FFFF

_BODY = struct.Struct("<QQIII")
_CHECK = struct.Struct("<I")
_FAILED = 1


class Record(NamedTuple):
    """One line of the output: the input line that it answers, its length and checksum."""

    number: int
    """The input's line, from 1."""
    digest: int
    """`seen.digest_of` the input's line."""
    length: int
    """Bytes in the output, with the newline."""
    crc: int
    """CRC-32 of these bytes."""
    failed: bool

    @classmethod
    def of(cls, number: int, digest: int, payload: bytes, *, failed: bool) -> "Record":
        return cls(number, digest, len(payload), zlib.crc32(payload), failed)

    def fits(self, data: bytes) -> bool:
        """Return whether `data` is the answer that this record describes."""
        return len(data) == self.length and zlib.crc32(data) == self.crc

    def pack(self) -> bytes:
        body = _BODY.pack(self.number, self.digest, self.length, self.crc, _FAILED if self.failed else 0)
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes) -> "Record | None":
        """Decode a record; return None if the bytes are incomplete or damaged."""
        if len(data) != RECORD_SIZE:
            return None
        number, digest, length, crc, flags = _BODY.unpack_from(data)
        if number == 0 or zlib.crc32(data[: _BODY.size]) != _CHECK.unpack_from(data, _BODY.size)[0]:
            return None
        return cls(number, digest, length, crc, bool(flags & _FAILED))


@dataclass(frozen=True)
class StateHeader:
    """The input and the flags of a run. `swap` names a rewritten output (see `rewrite.py`)."""

    input: InputFingerprint | None
    flags: Mapping[str, str]
    swap: str | None = None

    def encode(self) -> bytes:
        content = {"spmd_serve batch": FORMAT, **asdict(self), "flags": dict(self.flags)}
        text = json.dumps(content).encode()
        return text + b" %08x\n" % zlib.crc32(text)

    @classmethod
    def decode(cls, line: bytes) -> "StateHeader | None":
        """Decode a header line; return None if it is damaged or of another format."""
        text, _, check = line.rstrip(b"\n").rpartition(b" ")
        if not line.endswith(b"\n") or check != b"%08x" % zlib.crc32(text):
            return None
        content = json.loads(text)
        if content.get("spmd_serve batch") != FORMAT:
            return None
        known = content["input"]
        return cls(None if known is None else InputFingerprint(**known), content["flags"], content["swap"])

    def changes(self, now: "StateHeader") -> list[str]:
        """Describe each difference between this header and `now`."""
        found = []
        if (self.input is None) != (now.input is None):
            kinds = {True: "a pipe", False: "a file"}
            found.append(f"the input was {kinds[self.input is None]} and is {kinds[now.input is None]}")
        elif self.input is not None and now.input is not None and self.input != now.input:
            before, after = self.input, now.input
            if before.size != after.size:
                had = f"{before.lines} lines in {before.size} bytes"
                found.append(f"the input had {had} and has {after.lines} in {after.size}")
            else:
                found.append(f"the input has other content (still {after.size} bytes)")
        for name in sorted({*self.flags, *now.flags}):
            old, new = self.flags.get(name), now.flags.get(name)
            if old != new:
                was = "was not given" if old is None else f"was {old}"
                found.append(f"{name} {was} and is {'not given' if new is None else new}")
        return found


@dataclass(frozen=True)
class Holder:
    """The process that has an output open. `job` identifies its torchrun agent; empty without it."""

    pid: int
    host: str
    since: str
    job: str

    def encode(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        if len(text) >= HOLDER_SIZE:
            text = json.dumps(asdict(Holder(self.pid, self.host[:64], self.since, self.job[:128]))).encode()
        return text.ljust(HOLDER_SIZE - 1)[: HOLDER_SIZE - 1] + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> "Holder | None":
        """Decode a holder; return None if there is none or it is damaged."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"
