"""An output file that loses nothing: ``out.jsonl``, and ``out.jsonl.state`` with a record for each line.

Every finished answer is appended to the output, then its record to the state; `sync` puts both on disk in
that order. So after a kill at any byte, or a power cut, the records tell which lines are whole and which
input they answer. What is torn is cut off, and asked again. The state costs 32 bytes a line on disk, in
memory a bit a line.
"""

import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain

from spmd_serve.batch import rewrite
from spmd_serve.batch.lock import GRACE_S, open_locked, this_process, unlock
from spmd_serve.batch.records import HOLDER_SIZE, LONGEST_ANSWER, RECORD_SIZE, Header, Holder, Record
from spmd_serve.batch.recovery import inspect, read_records
from spmd_serve.batch.seen import LineSet
from spmd_serve.errors import SpmdError, UsageError

_LONGEST_HEADER = 1 << 20
_BUFFER = 1 << 20
_RESTART = "--restart begins anew"


class Journal:
    """The output and its state, both open and locked. Only `sync` may run in another thread."""

    def __init__(self, path: str, say: Callable[[str], None], grace_s: float = GRACE_S) -> None:
        """Open and lock; begins nothing yet. UsageError: another run has it, or it can't be opened."""
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
        self._hold("" if self.previous is None else self.previous.job)

    def begun_by(self, job: str) -> bool:
        """Whether there is a run to go on with, and it was this very job's: torchrun has restarted it."""
        known = self.previous is not None and self.previous.job == job and job != ""
        return known and self._read_header()[0] is not None

    def start(self, header: Header, *, job: str, restart: bool = False, retry_failed: bool = False) -> None:
        """Go on with what is there, or begin. `restart` begins anew, `retry_failed` forgets what has failed;
        neither when it is this very job that goes on, restarted by torchrun: it did so the first time.

        Raises UsageError that says what changed when the run before was another one.
        """
        before, end = self._read_header()
        first_time = not self.begun_by(job)
        try:
            if restart and first_time:
                self._begin(header)
            elif before is None:
                self._refuse_unknown_output()
                self._begin(header)
            else:
                self._resume(before, end, header, retry_failed and first_time)
            self._hold(job)
        except OSError as problem:
            raise SpmdError(self._trouble(problem)) from problem

    def digest_of(self, number: int) -> int | None:
        """The digest of an answered line of a piped input, as it was then; None where it is not known."""
        return self._digests[number] or None if number < len(self._digests) else None

    def append(self, record: Record, payload: bytes) -> None:
        """Add an answer: a whole line. After an SpmdError (a full disk, say) the output ends as before."""
        if record.length > LONGEST_ANSWER:
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
            raise SpmdError(self._trouble(problem)) from problem
        self._out_end += record.length
        self._state_end += RECORD_SIZE
        self.done.add(record.number)
        self.failed += record.failed
        self._dirty = True

    def sync(self) -> None:
        """Put on disk what was appended. Raises SpmdError."""
        with self._syncing:
            if not self._dirty:
                return
            self._dirty = False
            try:
                os.fsync(self._out)
                os.fsync(self._state)
            except OSError as problem:
                self._dirty = True
                raise SpmdError(self._trouble(problem)) from problem

    def sort(self) -> None:
        """Put the output in the order of the input. Takes its size again meanwhile. Raises SpmdError."""
        offsets, order = array("Q"), array("Q", bytes(8 * (self.done.highest() + 1)))
        end, last, in_order = 0, 0, True
        for index, record in read_records(self._state, self._start):
            in_order = in_order and record.number > last
            last = record.number
            order[record.number] = index + 1
            offsets.append(end)
            end += record.length
        if in_order:
            return
        indices = (index - 1 for index in order if index)
        try:
            self._rewrite((self._record(index), offsets[index]) for index in indices)
        except OSError as problem:
            raise SpmdError(self._trouble(problem)) from problem

    def close(self) -> None:
        """Give the output free. May be called twice."""
        with self._syncing:
            if self._state < 0:
                return
            unlock(self._state)
            os.close(self._state)
            os.close(self._out)
            self._state = self._out = -1
            self._dirty = False

    def _hold(self, job: str) -> None:
        with suppress(OSError):  # for people only, and a full disk shows soon enough
            _write_at(self._state, this_process(job).encode(), 0)

    def _read_header(self) -> tuple[Header | None, int]:
        line, newline, _ = os.pread(self._state, _LONGEST_HEADER, HOLDER_SIZE).partition(b"\n")
        line += newline
        return Header.decode(line), HOLDER_SIZE + len(line)

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

    def _begin(self, header: Header) -> None:
        for leftover in rewrite.leftovers(self.path):
            os.unlink(leftover)
        os.ftruncate(self._state, HOLDER_SIZE)  # first the state: an output without one is never trusted
        os.ftruncate(self._out, 0)
        line = header.encode()
        _write_at(self._state, line, HOLDER_SIZE)
        self._start = self._state_end = HOLDER_SIZE + len(line)
        os.fsync(self._state)
        rewrite.sync_directory(self.path)

    def _resume(self, before: Header, start: int, now: Header, retry_failed: bool) -> None:
        if changes := before.changes(now):
            raise UsageError(
                f"{self.path} was begun otherwise: {'; '.join(changes)}: run it as before, or {_RESTART}"
            )
        if rewrite.finish(self.path, before):
            os.close(self._out)
            self._out = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._start = start
        keep_digests = before.input is None

        def note(record: Record) -> bool:
            if retry_failed and record.failed:
                return True
            if not self.done.add(record.number):
                return False
            self.failed += record.failed
            if keep_digests:
                self._keep_digest(record)
            return True

        with open(self._out, "rb", buffering=_BUFFER, closefd=False) as output:
            found = inspect(output, read_records(self._state, start), note)
        self._out_end, self._state_end = found.end, start + found.records * RECORD_SIZE
        if found.lost or found.moved:
            self._say(f"{self.path}: {found.lost} finished answers are damaged or gone: they are asked again")
        if found.dropped:
            self._say(f"{self.path}: {found.dropped} bytes are torn, or not of this run: cut off")
        if found.moved or len(self.done) < found.records:
            kept = chain(self._pieces(found.records), found.moved)
            self._rewrite((record, at) for record, at in kept if not (retry_failed and record.failed))
        else:
            os.ftruncate(self._out, self._out_end)
            os.ftruncate(self._state, self._state_end)
        self._dirty = True
        self.sync()

    def _keep_digest(self, record: Record) -> None:
        if record.number >= len(self._digests):
            self._digests.extend(array("Q", bytes(8 * (record.number + 1))))
        self._digests[record.number] = record.digest

    def _pieces(self, count: int) -> Iterator[tuple[Record, int]]:
        """The first records, with the offsets of their lines."""
        end = 0
        for index, record in read_records(self._state, self._start):
            if index >= count:
                return
            yield record, end
            end += record.length

    def _record(self, index: int) -> Record:
        record = Record.unpack(os.pread(self._state, RECORD_SIZE, self._start + index * RECORD_SIZE))
        if record is None:
            raise SpmdError(f"{self._state_path} was changed by somebody else: run the same command again")
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

    def _trouble(self, problem: OSError) -> str:
        return (
            f"the output {self.path} cannot be written: {problem.strerror}; "
            f"{len(self.done)} answers are kept in it: cure that, then run the same command again to go on"
        )


def _write_at(fd: int, data: bytes, offset: int) -> None:
    """All of it, or OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
