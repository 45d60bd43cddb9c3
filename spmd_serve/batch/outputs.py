"""Where answers go: a file with its state (resumable, perhaps uploaded at the end), or a pipe."""

import asyncio
import os
import sys
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Protocol

from spmd_serve.batch.journal import Journal
from spmd_serve.batch.options import STDIO
from spmd_serve.batch.records import Record
from spmd_serve.batch.seen import LineSet
from spmd_serve.batch.source import ready
from spmd_serve.errors import SpmdError, UsageError

UPLOAD_TRIES = 5
UPLOAD_RETRY_S = 5.0
"""Seconds before the second try; doubled for each further one."""
UPLOAD_TIMEOUT_S = 1000.0

_ALWAYS_FITS = 4096
"""Bytes (PIPE_BUF) that a pipe which is ready takes without making the writer wait."""


class Output(Protocol):
    """What the run needs of an output. `done` and `failed` count earlier runs too."""

    name: str
    resumable: bool

    @property
    def done(self) -> LineSet: ...
    @property
    def failed(self) -> int: ...
    def digest_of(self, number: int) -> int | None: ...
    async def put(self, place: int, record: Record, payload: bytes) -> None: ...
    async def sync(self) -> None: ...
    async def finish(self) -> None: ...
    def close(self) -> None: ...


class FileOutput:
    """A journal; `upload_to` gets the whole at the end, sorted if `ordered`."""

    resumable = True

    def __init__(
        self, journal: Journal, *, ordered: bool, upload_to: str | None, say: Callable[[str], None]
    ) -> None:
        self.name = journal.path
        self.journal = journal
        self._ordered = ordered
        self._upload_to = upload_to
        self._say = say
        self._problem: SpmdError | None = None

    @property
    def done(self) -> LineSet:
        return self.journal.done

    @property
    def failed(self) -> int:
        return self.journal.failed

    def digest_of(self, number: int) -> int | None:
        """The digest of an answered line of a piped input."""
        return self.journal.digest_of(number)

    async def put(self, place: int, record: Record, payload: bytes) -> None:
        """Append a line. After an SpmdError nothing more: its count of what is kept must stay true."""
        if self._problem is not None:
            raise self._problem
        try:
            self.journal.append(record, payload)
        except SpmdError as problem:
            self._problem = problem
            raise

    async def sync(self) -> None:
        """Make what was appended durable, without holding up the event loop."""
        await asyncio.to_thread(self.journal.sync)

    async def finish(self) -> None:
        """All lines are there: sort and upload. Raises SpmdError; then the file still holds all."""
        await self.sync()
        if self._ordered:
            await asyncio.to_thread(self.journal.sort)
        if self._upload_to is not None:
            await upload(self.name, self._upload_to, self._say)
            self._say(f"uploaded to {self._upload_to}; a copy stays in {self.name}")

    def close(self) -> None:
        self.journal.close()


class StreamOutput:
    """Standard output, or a named pipe: what is written is gone, so nothing can be resumed.

    With `ordered`, an answer waits for those before it, and its place among those in flight is not free
    meanwhile.
    """

    resumable = False

    def __init__(self, path: str, *, ordered: bool) -> None:
        """For ``-``, take over standard output, unless `take_stdout` has done so already."""
        self.name = "standard output" if path == STDIO else path
        self.done = LineSet()
        self.failed = 0
        self._is_stdout = path == STDIO
        self._ordered = ordered
        self._next = 0
        self._early: dict[int, asyncio.Future[None]] = {}
        self._lock = asyncio.Lock()
        if self._is_stdout:
            self._gives_back = _stdout < 0
            self._fd = take_stdout()
            return
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise UsageError(f"the output {path} cannot be written: {problem.strerror}") from problem

    def digest_of(self, number: int) -> int | None:
        """Nothing is known of earlier runs."""
        return None

    async def put(self, place: int, record: Record, payload: bytes) -> None:
        """Write a line; `place` counts the input's lines without gaps, from 0."""
        if self._ordered and place != self._next:
            turn = self._early[place] = asyncio.get_running_loop().create_future()
            await turn
        async with self._lock:
            await self._write(payload)
        self.done.add(record.number)
        self.failed += record.failed
        if self._ordered:
            self._next = place + 1
            following = self._early.pop(self._next, None)
            if following is not None and not following.done():
                following.set_result(None)

    async def _write(self, payload: bytes) -> None:
        view = memoryview(payload)
        try:
            while view:
                await ready(self._fd, writing=True)
                view = view[os.write(self._fd, view[:_ALWAYS_FITS]) :]
        except BrokenPipeError as problem:
            raise SpmdError(
                f"whoever read {self.name} is gone: {len(self.done)} answers were written"
            ) from problem
        except OSError as problem:
            raise SpmdError(f"{self.name} cannot be written: {problem.strerror}") from problem

    async def sync(self) -> None:
        """A pipe holds nothing back."""

    async def finish(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Gives standard output back, if it took it. May be called twice."""
        if self._fd < 0:
            return
        if self._is_stdout:
            if self._gives_back:
                give_stdout_back()
        else:
            os.close(self._fd)
        self._fd = -1


_stdout = -1


def take_stdout() -> int:
    """Standard output as it was; what anybody prints there from now on goes to standard error.

    Answers and the log lines of vLLM, which prints to standard output, must not mix: so every process that
    shares a standard output calls this before it prints anything.
    """
    global _stdout
    if _stdout < 0:
        sys.stdout.flush()
        _stdout = os.dup(1)
        os.dup2(2, 1)
    return _stdout


def give_stdout_back() -> None:
    """Undo `take_stdout`."""
    global _stdout
    sys.stdout.flush()
    os.dup2(_stdout, 1)
    os.close(_stdout)
    _stdout = -1


async def upload(path: str, url: str, say: Callable[[str], None]) -> None:
    """PUT a file, with retries. Raises SpmdError when all have failed; the file stays."""
    for attempt in range(1, UPLOAD_TRIES + 1):
        try:
            await asyncio.to_thread(_put, path, url)
        except (OSError, HTTPException) as problem:
            if attempt == UPLOAD_TRIES:
                raise SpmdError(
                    f"{url} takes no upload: {problem}; the answers are in {path}: "
                    "run the same command again to try again"
                ) from problem
            pause_s = UPLOAD_RETRY_S * 2 ** (attempt - 1)
            again = f"try {attempt + 1} of {UPLOAD_TRIES} in {pause_s:g} s"
            say(f"upload to {url} failed ({problem}): {again}")
            await asyncio.sleep(pause_s)
        else:
            return


def _put(path: str, url: str) -> None:
    with open(path, "rb") as file:
        headers = {
            "Content-Length": str(os.fstat(file.fileno()).st_size),
            "Content-Type": "application/jsonl",
        }
        request = urllib.request.Request(url, data=file, headers=headers, method="PUT")
        with urllib.request.urlopen(request, timeout=UPLOAD_TIMEOUT_S) as answer:
            answer.read()
