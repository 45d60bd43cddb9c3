"""A resumable output: ``out.jsonl``, and ``out.jsonl.state`` with one record per finished line.

Every finished answer is appended to the output, then its record is appended to the state. `sync` writes
both to disk in that order. After a kill or a power failure, the records tell which answers are complete and
which input line each of them answers. The first answer that does not match its record, and everything after
it, is cut off and asked again. The state takes 32 bytes per line on disk, and one bit per line in memory.
"""

import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from spmd_serve.batch import rewrite
from spmd_serve.batch.lock import GRACE_S, open_locked, this_process, unlock
from spmd_serve.batch.records import HOLDER_SIZE, MAX_ANSWER_BYTES, RECORD_SIZE, Holder, Record, StateHeader
from spmd_serve.batch.seen import LineSet
from spmd_serve.errors import SpmdError, UsageError

MAX_ANSWERS_CUT = 10_000
"""Complete answers that a resumed run may cut off: more than a crash leaves unsynchronized."""

_MAX_HEADER_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20
_RECORDS_PER_READ = 4096
_RESTART = "--restart begins anew"


class Journal:
    """The output and its state, both open and locked. Only `sync` may run in another thread."""

    def __init__(self, path: str, say: Callable[[str], None], grace_s: float = GRACE_S) -> None:
        """Open and lock both files; `start` then resumes or begins a run.

        Raises UsageError if another run still holds the lock after `grace_s` seconds, or if a file cannot
        be opened.
        """
        self.path = path
        self.done = LineSet()
        self.failed = 0
        self._digests = array("Q")
        self._say = say
        self._state_path = path + ".state"
        self._state = open_locked(self._state_path, path, grace_s)
        try:
            self._out = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            os.close(self._state)
            raise UsageError(f"the output {path} cannot be written: {problem.strerror}") from problem
        self._out_end = self._start = self._state_end = 0
        self._dirty = False
        self._syncing = threading.Lock()
        self.previous = Holder.decode(os.pread(self._state, HOLDER_SIZE, 0))
        self._write_holder("" if self.previous is None else self.previous.job)

    def begun_by(self, job: str) -> bool:
        """Return whether the state holds a run of this very job, which torchrun has restarted since."""
        known = self.previous is not None and self.previous.job == job and job != ""
        return known and self._read_header()[0] is not None

    def start(
        self,
        header: StateHeader,
        *,
        job: str,
        restarted: bool = False,
        restart: bool = False,
        retry_failed: bool = False,
    ) -> None:
        """Resume the run that the state describes, or begin a new one.

        `restart` begins anew, and `retry_failed` asks failed lines again. Both apply only to the first round
        of a job: not if this job began the run, and not if torchrun has `restarted` the job (rank 0 may be on
        another node now, under another `job` name).

        Raises UsageError if the run in the state differs from `header`; the message names the differences.
        """
        before, start = self._read_header()
        first_round = before is None or not (restarted or self.begun_by(job))
        try:
            if restart and first_round:
                self._begin(header)
            elif before is None:
                self._refuse_unknown_output()
                self._begin(header)
            else:
                self._resume(before, start, header, retry_failed and first_round)
            self._write_holder(job)
        except OSError as problem:
            raise SpmdError(self._write_error(problem)) from problem

    def digest_of(self, number: int) -> int | None:
        """Return the digest that an answered line of a piped input had, or None if it is unknown."""
        return self._digests[number] or None if number < len(self._digests) else None

    def append(self, record: Record, payload: bytes) -> None:
        """Append one answer, a complete line.

        Raises SpmdError if the write fails, for example on a full disk; the files then end as before.
        """
        if record.length > MAX_ANSWER_BYTES:
            raise SpmdError(f"line {record.number}: an answer of {record.length} bytes is too long to store")
        if record.number in self.done:
            raise AssertionError(f"line {record.number} answered twice")
        try:
            _write_at(self._out, payload, self._out_end)
            _write_at(self._state, record.pack(), self._state_end)
        except OSError as problem:
            with suppress(OSError):
                os.ftruncate(self._state, self._state_end)
                os.ftruncate(self._out, self._out_end)
            raise SpmdError(self._write_error(problem)) from problem
        self._out_end += record.length
        self._state_end += RECORD_SIZE
        self.done.add(record.number)
        self.failed += record.failed
        self._dirty = True

    def sync(self) -> None:
        """Write everything that was appended to disk. Raises SpmdError."""
        with self._syncing:
            if not self._dirty:
                return
            self._dirty = False
            try:
                os.fsync(self._out)
                os.fsync(self._state)
            except OSError as problem:
                self._dirty = True
                raise SpmdError(self._write_error(problem)) from problem

    def sort(self) -> None:
        """Rewrite the output in input order, which needs its size again on disk. Raises SpmdError."""
        offsets, order = array("Q"), array("Q", bytes(8 * (self.done.highest() + 1)))
        last, in_order = 0, True
        for index, (record, offset) in enumerate(self._records()):
            in_order = in_order and record.number > last
            last = record.number
            order[record.number] = index + 1
            offsets.append(offset)
        if in_order:
            return
        indices = (index - 1 for index in order if index)
        try:
            self._rewrite((self._record(index), offsets[index]) for index in indices)
        except OSError as problem:
            raise SpmdError(self._write_error(problem)) from problem

    def close(self) -> None:
        """Close both files and release the lock. May be called twice."""
        with self._syncing:
            if self._state < 0:
                return
            unlock(self._state)
            os.close(self._state)
            os.close(self._out)
            self._state = self._out = -1
            self._dirty = False

    def _write_holder(self, job: str) -> None:
        with suppress(OSError):  # only informs people; a full disk is reported by the first append
            _write_at(self._state, this_process(job).encode(), 0)

    def _read_header(self) -> tuple[StateHeader | None, int]:
        """Return the header, and the offset at which the records begin."""
        line, newline, _ = os.pread(self._state, _MAX_HEADER_BYTES, HOLDER_SIZE).partition(b"\n")
        line += newline
        return StateHeader.decode(line), HOLDER_SIZE + len(line)

    def _refuse_unknown_output(self) -> None:
        if os.fstat(self._out).st_size == 0:
            return
        if os.fstat(self._state).st_size > HOLDER_SIZE:
            raise UsageError(
                f"{self._state_path} is damaged, or of another version of spmd_serve: {_RESTART}"
            )
        raise UsageError(
            f"{self.path} exists, and was not written by spmd_serve batch (it has no state beside it): "
            f"name another -o, or {_RESTART} and overwrites it"
        )

    def _begin(self, header: StateHeader) -> None:
        for leftover in rewrite.leftovers(self.path):
            os.unlink(leftover)
        os.ftruncate(self._state, HOLDER_SIZE)  # the state first: an output without one is never trusted
        os.ftruncate(self._out, 0)
        line = header.encode()
        _write_at(self._state, line, HOLDER_SIZE)
        self._start = self._state_end = HOLDER_SIZE + len(line)
        os.fsync(self._state)
        rewrite.sync_directory(self.path)

    def _resume(self, before: StateHeader, start: int, now: StateHeader, retry_failed: bool) -> None:
        if changes := before.changes(now):
            raise UsageError(
                f"{self.path} was begun otherwise: {'; '.join(changes)}: run it as before, or {_RESTART}"
            )
        if rewrite.finish(self.path, before):
            os.close(self._out)
            self._out = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._start = self._state_end = start
        self._check_answers(keep_digests=before.input is None)
        self._cut()
        if retry_failed and self.failed:
            failed = [record.number for record, _ in self._records() if record.failed]
            self._rewrite(piece for piece in self._records() if not piece[0].failed)
            for number in failed:
                self.done.remove(number)
            self.failed = 0
        self._dirty = True
        self.sync()

    def _check_answers(self, *, keep_digests: bool) -> None:
        """Read output and records in step, up to the first answer that does not match its record."""
        with open(self._out, "rb", buffering=_BUFFER_BYTES, closefd=False) as output:
            output.seek(0)
            for record, _ in self._records():
                if not record.fits(output.read(record.length)) or not self.done.add(record.number):
                    break
                self.failed += record.failed
                self._out_end += record.length
                self._state_end += RECORD_SIZE
                if keep_digests:
                    self._keep_digest(record)

    def _cut(self) -> None:
        """Cut off everything after the answers that `_check_answers` has found.

        Raises UsageError, and cuts nothing, if this would throw away more complete answers than a crash can
        damage: then the output was edited, and perhaps its owner can restore it.
        """
        dropped = os.fstat(self._out).st_size - self._out_end
        lost = max(os.fstat(self._state).st_size - self._state_end, 0) // RECORD_SIZE
        if lost > MAX_ANSWERS_CUT and self._lines_after(self._out_end) > MAX_ANSWERS_CUT:
            raise UsageError(
                f"{self.path} was edited or damaged after line {len(self.done)}: {lost} finished answers no "
                f"longer match {self._state_path}; restore the file, or run "
                f"`truncate -s {self._out_end} {self.path}` to ask these lines again, or {_RESTART}"
            )
        if lost:
            self._say(f"{self.path}: {lost} finished answers are damaged or gone: they are asked again")
        if dropped > 0:
            self._say(f"{self.path}: {dropped} bytes are torn, or not of this run: cut off")
        os.ftruncate(self._out, self._out_end)
        os.ftruncate(self._state, self._state_end)

    def _lines_after(self, offset: int) -> int:
        """Return the number of lines in the output after byte `offset`."""
        count = 0
        while data := os.pread(self._out, _BUFFER_BYTES, offset):
            count += data.count(b"\n")
            offset += len(data)
        return count

    def _keep_digest(self, record: Record) -> None:
        if record.number >= len(self._digests):
            self._digests.extend(array("Q", bytes(8 * (record.number + 1))))
        self._digests[record.number] = record.digest

    def _records(self) -> Iterator[tuple[Record, int]]:
        """Yield each record with the offset of its answer in the output, up to the first damaged record."""
        place, offset = self._start, 0
        while data := os.pread(self._state, _RECORDS_PER_READ * RECORD_SIZE, place):
            for at in range(0, len(data), RECORD_SIZE):
                record = Record.unpack(data[at : at + RECORD_SIZE])
                if record is None:
                    return
                yield record, offset
                offset += record.length
            place += len(data)

    def _record(self, index: int) -> Record:
        record = Record.unpack(os.pread(self._state, RECORD_SIZE, self._start + index * RECORD_SIZE))
        if record is None:
            raise SpmdError(f"{self._state_path} was changed by another program: run the same command again")
        return record

    def _rewrite(self, pieces: Iterable[tuple[Record, int]]) -> None:
        header, _ = self._read_header()
        assert header is not None
        new = rewrite.rewrite(self.path, self._out, self._state, header, pieces)
        unlock(self._state)
        os.close(self._state)
        os.close(self._out)
        self._out, self._state = new.out, new.state
        self._out_end, self._start, self._state_end = new.out_end, new.start, new.state_end

    def _write_error(self, problem: OSError) -> str:
        return (
            f"the output {self.path} cannot be written: {problem.strerror}; "
            f"{len(self.done)} answers are kept in it: "
            "remove the cause, then run the same command again to go on"
        )


def _write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
