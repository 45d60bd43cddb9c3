"""The status table: what members record, the watcher reads."""

import os
import time
from collections.abc import Iterator

import pytest

from spmd_serve.liveness.status_table import (
    ENTRIES,
    TABLE_BYTES,
    EntryReading,
    NullStatusEntry,
    StatusEntry,
    StatusTable,
)


@pytest.fixture
def table() -> Iterator[StatusTable]:
    made = StatusTable()
    yield made
    os.close(made.fd)


def test_the_table_shows_what_a_member_records(table: StatusTable) -> None:
    number = table.take()
    assert number is not None
    assert table.read(number) == EntryReading(0, 0, "starting", 0.0, 0.0, 0.0)
    entry, before = StatusEntry(table.fd, number), time.monotonic()
    entry.state("ready")
    entry.step_begin()
    entry.step_begin()
    entry.step_end()
    reading = table.read(number)
    assert (reading.started, reading.done, reading.state) == (2, 1, "ready")
    assert before <= reading.turned_at <= reading.started_at <= reading.done_at <= time.monotonic()
    assert reading.last_sign == reading.done_at
    entry.works()
    assert before <= table.read(number).works_since <= time.monotonic()
    entry.waits()
    assert table.read(number) == reading
    for works in (False, True):  # a driver waits for a reply, between steps or in one
        assert entry.awaits(0) is works
        assert (table.read(number).awaits, table.read(number).works_since >= before) == (0, True)
        entry.replied(works)
        assert (table.read(number).awaits, table.read(number).works_since > 0.0) == (None, works)
        entry.works()
    entry.waits()
    assert table.read(number) == reading
    entry.detach()
    entry.step_end()
    assert table.read(number) == reading


def test_entries_are_separate_zeroed_and_limited(table: StatusTable) -> None:
    numbers = [table.take() for _ in range(ENTRIES)]
    assert len({*numbers}) == ENTRIES and None not in numbers and table.take() is None
    StatusEntry(table.fd, 7).step_begin()
    assert table.read(6).started == table.read(8).started == 0
    table.give_back(7)
    assert table.take() == 7 and table.read(7).started == 0


def test_the_memory_cannot_be_shrunk(table: StatusTable) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(table.fd, TABLE_BYTES // 2)


def test_recording_a_step_is_cheap(table: StatusTable) -> None:
    entry = StatusEntry(table.fd, 0)
    best = min(seconds_per_step(entry) for _ in range(5))
    print(f"step_begin + step_end: {best * 1e6:.2f} µs")
    assert best < 20e-6


def seconds_per_step(entry: StatusEntry) -> float:
    start = time.perf_counter()
    for _ in range(1000):
        entry.step_begin()
        entry.step_end()
    return (time.perf_counter() - start) / 1000


def test_a_process_without_a_watcher_records_to_nowhere() -> None:
    entry = NullStatusEntry()
    entry.state("ready")
    entry.step_begin()
    entry.step_end()
    entry.sent(1, 2, 0.5)
    assert entry.awaits(1) is False
    entry.replied(False)
    entry.detach()
