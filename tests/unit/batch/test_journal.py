"""The output file and its state: appended, torn at any byte, damaged, edited, sorted, locked."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from spmd_serve.batch import journal as journal_module
from spmd_serve.batch.journal import Journal
from spmd_serve.batch.outputs import FileOutput
from spmd_serve.batch.records import HOLDER_SIZE, RECORD_SIZE, Holder, Record, StateHeader
from spmd_serve.batch.source import InputFingerprint
from spmd_serve.errors import SpmdError, UsageError

HEADER = StateHeader(InputFingerprint(100, "ab", 8), {"--model": "m"})
LINES = {number: b'{"answer": %d, "text": "%s"}\n' % (number, b"x" * number) for number in range(1, 9)}
ORDER = (3, 1, 2, 5, 4, 8, 6, 7)
FAILED = (5, 6)


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open a journal hundreds of times, and cut no power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def quiet(text: str) -> None:
    """For what nobody wants to read here."""


@contextmanager
def opened(
    path: Path,
    header: StateHeader = HEADER,
    *,
    say: Callable[[str], None] = quiet,
    job: str = "",
    restarted: bool = False,
    restart: bool = False,
    retry_failed: bool = False,
) -> Iterator[Journal]:
    journal = Journal(str(path), say, grace_s=0)
    try:
        journal.start(header, job=job, restarted=restarted, restart=restart, retry_failed=retry_failed)
        yield journal
    finally:
        journal.close()


def record_of(number: int) -> Record:
    return Record.of(number, 1000 + number, LINES[number], failed=number in FAILED)


def append(journal: Journal, number: int) -> None:
    journal.append(record_of(number), LINES[number])


def written(path: Path, numbers: tuple[int, ...] = ORDER, header: StateHeader = HEADER) -> Path:
    with opened(path, header) as journal:
        for number in numbers:
            append(journal, number)
        journal.sync()
    return path


def finish(path: Path) -> set[int]:
    """Do what a rerun does; the numbers that it had to do again."""
    with opened(path) as journal:
        missing = {number for number in LINES if number not in journal.done}
        for number in sorted(missing):
            append(journal, number)
        assert journal.failed == len(FAILED)
    assert sorted(path.read_bytes().splitlines(True)) == sorted(LINES.values())
    return missing


def state_of(path: Path) -> Path:
    return path.with_name(path.name + ".state")


def copy(path: Path, to: Path) -> Path:
    shutil.copy(path, to)
    shutil.copy(state_of(path), state_of(to))
    return to


def test_a_rerun_finds_all(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl", ORDER[:5])
    assert out.read_bytes() == b"".join(LINES[number] for number in ORDER[:5])
    assert finish(out) == set(ORDER[5:])
    assert finish(out) == set()


def test_torn_at_every_byte(tmp_path: Path, no_fsync: None) -> None:
    """Either file cut anywhere in its last three records: only what was cut is done again."""
    out = written(tmp_path / "out.jsonl")
    tail = sum(len(LINES[number]) for number in ORDER[-3:])
    for torn, length in ((out, tail), (state_of(out), 3 * RECORD_SIZE)):
        for cut in range(1, length + 1):
            again = copy(out, tmp_path / "again.jsonl")
            file = again if torn is out else state_of(again)
            os.truncate(file, torn.stat().st_size - cut)
            missing = finish(again)
            assert missing == set(ORDER[-len(missing) :])
            assert 1 <= len(missing) <= 3


def test_torn_in_both_at_once(tmp_path: Path, no_fsync: None) -> None:
    out = written(tmp_path / "out.jsonl")
    for cut in range(0, 90, 7):
        for state_cut in range(0, 3 * RECORD_SIZE, 9):
            again = copy(out, tmp_path / "again.jsonl")
            os.truncate(again, out.stat().st_size - cut)
            os.truncate(state_of(again), state_of(out).stat().st_size - state_cut)
            assert len(finish(again)) <= 4


def test_damaged_at_every_byte(tmp_path: Path, no_fsync: None) -> None:
    """A wrong byte anywhere in the last three records costs its answer and those after it, no other."""
    out = written(tmp_path / "out.jsonl")
    tail = sum(len(LINES[number]) for number in ORDER[-3:])
    for damaged, length in ((out, tail), (state_of(out), 3 * RECORD_SIZE)):
        for place in range(damaged.stat().st_size - length, damaged.stat().st_size):
            again = copy(out, tmp_path / "again.jsonl")
            file = again if damaged is out else state_of(again)
            content = bytearray(file.read_bytes())
            content[place] ^= 0xFF
            file.write_bytes(content)
            missing = finish(again)
            assert 1 <= len(missing) <= 3
            assert missing == set(ORDER[-len(missing) :])


def test_a_hole_of_zeros_after_a_power_cut(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl")
    size = out.stat().st_size
    os.truncate(out, size - 60)
    os.truncate(out, size)
    with state_of(out).open("ab") as state:
        state.write(bytes(77))
    assert 1 <= len(finish(out)) <= 3


def test_an_edited_output_is_asked_again_from_the_edit_on(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl")
    lines = out.read_bytes().splitlines(True)
    out.write_bytes(b"".join([lines[1], b'{"not": "ours"}\n', *lines[3:6], lines[0], lines[7]]))
    said: list[str] = []
    with opened(out, say=said.append) as journal:
        assert len(journal.done) == 0
    assert "8 finished answers are damaged or gone" in said[0]
    assert "bytes are torn, or not of this run" in said[1]
    assert finish(out) == set(ORDER)


def test_an_edit_within_the_output_keeps_the_answers_before_it(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl")
    lines = out.read_bytes().splitlines(True)
    out.write_bytes(b"".join([*lines[:3], *lines[4:]]))
    assert finish(out) == set(ORDER[3:])


def test_an_edit_that_costs_many_answers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither file changes, and the command that the message shows keeps the answers before the edit."""
    monkeypatch.setattr(journal_module, "MAX_ANSWERS_CUT", 3)
    out = written(tmp_path / "out.jsonl")
    lines = out.read_bytes().splitlines(True)
    edited = b"".join([lines[0], *lines[2:]])
    out.write_bytes(edited)
    state = state_of(out).read_bytes()[HOLDER_SIZE:]
    kept = len(lines[0])
    with (
        pytest.raises(UsageError, match=f"7 finished answers no longer match .*truncate -s {kept} "),
        opened(out),
    ):
        pass
    assert out.read_bytes() == edited
    assert state_of(out).read_bytes()[HOLDER_SIZE:] == state
    os.truncate(out, kept)
    assert finish(out) == set(ORDER[1:])


def test_a_line_pasted_twice_stays_once(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl")
    out.write_bytes(out.read_bytes() + LINES[7])
    assert finish(out) == set()


def test_failed_lines_can_be_asked_again(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl")
    with opened(out, retry_failed=True) as journal:
        assert {number for number in LINES if number not in journal.done} == set(FAILED)
        assert journal.failed == 0
        append(journal, FAILED[0])
    assert finish(out) == {FAILED[1]}


def test_sorted(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl")
    with opened(out) as journal:
        journal.sort()
        inode = out.stat().st_ino
        journal.sort()
        assert out.stat().st_ino == inode, "what is in order is not written again"
    assert out.read_bytes() == b"".join(LINES[number] for number in sorted(LINES))
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.state"]
    assert finish(out) == set()


def test_appending_after_a_sort(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl", ORDER[:4])
    with opened(out) as journal:
        journal.sort()
        append(journal, ORDER[4])
        journal.sort()
    assert finish(out) == set(ORDER[5:])


def test_a_crash_at_each_step_of_a_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Crash(Exception):
        pass

    for step in range(6):
        (tmp_path / str(step)).mkdir()
        out = written(tmp_path / str(step) / "out.jsonl")
        steps = iter(range(100))

        def crash(call: Callable[..., object], steps: Iterator[int] = steps, step: int = step) -> object:
            def instead(*arguments: object) -> object:
                if next(steps) == step:
                    raise Crash
                return call(*arguments)

            return instead

        with monkeypatch.context() as patch, opened(out) as journal:
            patch.setattr(os, "unlink", lambda path: None)  # a dead process cleans nothing up
            patch.setattr(os, "rename", crash(os.rename))
            patch.setattr(os, "fsync", crash(os.fsync))
            try:
                journal.sort()
                assert step > 4
            except Crash:
                pass
        assert finish(out) == set()
        assert sorted(os.listdir(out.parent)) == ["out.jsonl", "out.jsonl.state"]


def test_another_run_is_refused_with_what_changed(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl", ORDER[:2])
    before = out.read_bytes()
    others = {
        "--model was m and is n": StateHeader(HEADER.input, {"--model": "n"}),
        "--dtype was not given and is half": StateHeader(HEADER.input, {"--model": "m", "--dtype": "half"}),
        "--model was m and is not given": StateHeader(HEADER.input, {}),
        "the input had 8 lines in 100 bytes and has 9 in 110": StateHeader(
            InputFingerprint(110, "cd", 9), HEADER.flags
        ),
        r"the input has other content \(still 100 bytes\)": StateHeader(
            InputFingerprint(100, "cd", 8), HEADER.flags
        ),
        "the input was a file and is a pipe": StateHeader(None, HEADER.flags),
    }
    for what, header in others.items():
        with pytest.raises(UsageError, match=what + ".*--restart begins anew"), opened(out, header):
            pass
    assert out.read_bytes() == before
    assert finish(out) == set(ORDER[2:])


def test_restart_begins_anew(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl")
    with opened(out, StateHeader(None, {}), restart=True) as journal:
        assert len(journal.done) == 0
    assert out.read_bytes() == b""


def test_restart_begins_anew_once_in_a_job(tmp_path: Path) -> None:
    """torchrun runs the same command again after a crash: --restart must not throw away what it did."""
    out = written(tmp_path / "out.jsonl")
    with opened(out, job="one", restart=True) as journal:
        assert len(journal.done) == 0
        append(journal, 1)
    with pytest.raises(UsageError), opened(out, StateHeader(None, {}), job="two"):
        pass
    with opened(out, job="one", restart=True) as journal:
        assert len(journal.done) == 1
    with opened(out, job="two", restart=True, restarted=True) as journal:
        assert len(journal.done) == 1, "rank 0 has moved to another node"
    with opened(out, job="three", restart=True) as journal:
        assert len(journal.done) == 0


def test_what_somebody_else_wrote_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    with pytest.raises(UsageError, match="exists, and was not written by spmd_serve batch"), opened(out):
        pass
    assert out.read_text() == "precious\n"
    state_of(out).write_bytes(bytes(HOLDER_SIZE) + b"rubbish\n")
    with pytest.raises(UsageError, match="is damaged, or of another version"), opened(out):
        pass
    assert out.read_text() == "precious\n"
    with opened(out, restart=True):
        assert out.read_text() == ""


def test_a_damaged_header_is_never_taken_for_a_run(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl")
    content = state_of(out).read_bytes()
    for place in range(HOLDER_SIZE, content.index(b"\n", HOLDER_SIZE)):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        state_of(out).write_bytes(damaged)
        with pytest.raises(UsageError, match="is damaged"), opened(out):
            pass
    state_of(out).write_bytes(content)
    assert finish(out) == set()


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out, job="j" * 600) as journal:
        with pytest.raises(UsageError, match=f"being written by another run .process {os.getpid()} on "):
            Journal(str(out), quiet, grace_s=0)
        append(journal, 1)
        journal.sort()
        append(journal, 3)
        append(journal, 2)
        journal.sort()
        with pytest.raises(UsageError, match="being written by another run"):
            Journal(str(out), quiet, grace_s=0)
    assert finish(out) == {4, 5, 6, 7, 8}


def test_a_lock_is_waited_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after torchrun has killed the run before, which may take its time to die."""
    out = tmp_path / "out.jsonl"
    journal = Journal(str(out), quiet)
    monkeypatch.setattr(time, "sleep", lambda seconds: journal.close())
    Journal(str(out), quiet, grace_s=60).close()


def test_the_lock_ends_although_a_forked_child_still_has_the_files(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "out.jsonl"), quiet)
    child = os.dup(journal._state)
    try:
        journal.close()
        Journal(str(tmp_path / "out.jsonl"), quiet, grace_s=0).close()
    finally:
        os.close(child)


def test_digests_are_known_for_a_pipe_only(tmp_path: Path) -> None:
    pipe = StateHeader(None, {})
    out = written(tmp_path / "out.jsonl", ORDER[:3], pipe)
    with opened(out, pipe) as journal:
        assert [journal.digest_of(number) for number in (1, 2, 3, 4, 10**6)] == [1001, 1002, 1003, None, None]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        Journal(str(tmp_path / "none" / "out.jsonl"), quiet)


def test_records_and_holders_round_trip() -> None:
    record = Record.of(2**40, 2**64 - 1, b"text\n", failed=True)
    assert Record.unpack(record.pack()) == record
    assert len(record.pack()) == RECORD_SIZE
    assert Record.unpack(bytes(RECORD_SIZE)) is None
    holder = Holder(1, "h" * 300, "now", "j" * 300)
    assert len(holder.encode()) == HOLDER_SIZE
    assert Holder.decode(holder.encode()) is not None
    assert Holder.decode(bytes(HOLDER_SIZE)) is None
    assert StateHeader.decode(HEADER.encode()) == HEADER


def test_after_a_failed_write_a_run_appends_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what else was in flight a shorter answer might fit, and the count that was told would be wrong."""
    with opened(tmp_path / "out.jsonl", restart=True) as journal:
        output = FileOutput(journal, ordered=False, upload_to=None, say=lambda text: None)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", mock.Mock(side_effect=OSError(27, "File too large")))
            with pytest.raises(SpmdError, match="File too large; 0 answers are kept"):
                asyncio.run(output.put(0, record_of(1), LINES[1]))
        with pytest.raises(SpmdError, match="File too large; 0 answers are kept"):
            asyncio.run(output.put(1, record_of(2), LINES[2]))
        assert len(journal.done) == 0


def test_an_append_that_fails_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    real = os.pwrite
    for refused in range(2):
        with opened(out, restart=True) as journal, monkeypatch.context() as patch:
            append(journal, 1)
            calls = iter(range(100))

            def pwrite(
                fd: int, data: bytes, at: int, calls: Iterator[int] = calls, refused: int = refused
            ) -> int:
                if next(calls) == refused:
                    real(fd, data[:5], at)
                    raise OSError(28, "No space left on device")
                return real(fd, data, at)

            patch.setattr(os, "pwrite", pwrite)
            with pytest.raises(SpmdError, match=r"No space left on device; 1 answers are kept"):
                append(journal, 2)
            assert out.read_bytes() == LINES[1]
            append(journal, 2)
        assert finish(out) == set(LINES) - {1, 2}
