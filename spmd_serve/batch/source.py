"""Where requests come from: a file, a web server, or a pipe. Read as a stream; only a chunk is in memory."""

import asyncio
import gzip
import hashlib
import os
import shutil
import stat
import tempfile
import urllib.request
import zlib
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import BinaryIO

from spmd_serve.batch.options import STDIO, is_url
from spmd_serve.errors import SpmdError, UsageError

CHUNK = 1 << 18
URL_TIMEOUT_S = 300
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class InputFingerprint:
    """What tells one input from another. `lines` are those that are not blank."""

    size: int
    sha256: str
    lines: int

    def as_json(self) -> dict[str, int | str]:
        return asdict(self)


class InputSource:
    """An open input. A pipe's content is known only once it has been read."""

    def __init__(self, name: str, fd: int, *, is_pipe: bool) -> None:
        self.name = name
        self.is_pipe = is_pipe
        self._fd = fd

    @classmethod
    def open(cls, name: str, spool_dir: str | None = None) -> "InputSource":
        """Open a path, an http(s) URL (fetched to an unnamed file in `spool_dir`), or ``-``.

        Raises UsageError when it cannot be read.
        """
        if is_url(name):
            fd = _fetch(name, spool_dir)
        else:
            try:
                # A copy: a forked child loses standard input itself (multiprocessing closes it).
                fd = os.dup(0) if name == STDIO else os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as problem:
                raise UsageError(f"the input {name} cannot be read: {problem.strerror}") from problem
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise UsageError(f"the input {name} is a directory: name a file")
            return cls("standard input" if name == STDIO else name, fd, is_pipe=not stat.S_ISREG(mode))
        except BaseException:
            os.close(fd)
            raise

    def identify(self) -> InputFingerprint | None:
        """Read a file once through; None for a pipe. Raises UsageError when it cannot be read."""
        try:
            return None if self.is_pipe else _fingerprint(self._open_file())
        except OSError as problem:
            reason = problem.strerror or problem
            raise UsageError(f"the input {self.name} cannot be read: {reason}") from problem
        except (EOFError, zlib.error) as problem:
            raise UsageError(f"the input {self.name} is a damaged gzip file: {problem}") from problem

    def _open_file(self) -> BinaryIO | gzip.GzipFile:
        """Return the content of a file from its start, unpacked if it is gzip."""
        file = open(self._fd, "rb", buffering=1 << 20, closefd=False)  # noqa: SIM115
        file.seek(0)
        return gzip.GzipFile(fileobj=file) if os.pread(self._fd, 2, 0) == _GZIP else file

    def is_same_file(self, path: str) -> bool:
        """Whether `path` is this very file."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except OSError:
            return False

    async def lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """Number (from 1, blank lines count) and content of every line that is not blank.

        Lets others run between chunks. Raises SpmdError when reading fails.
        """
        number, parts = 0, list[bytes]()
        file = None if self.is_pipe else self._open_file()
        while chunk := await self._read(file):
            if file is None and number == 0 and not parts and chunk.startswith(_GZIP):
                raise UsageError(f"the input {self.name} is gzip: pipe it through `gzip -dc`")
            pieces = chunk.split(b"\n")
            for piece in pieces[:-1]:
                number += 1
                line = b"".join([*parts, piece]) if parts else piece
                parts.clear()
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line and not line.isspace():
                    yield number, line
            if pieces[-1]:
                parts.append(pieces[-1])
            await asyncio.sleep(0)
        rest = b"".join(parts)
        if number == 0:
            rest = rest.removeprefix(_BOM)
        if rest and not rest.isspace():
            yield number + 1, rest

    async def _read(self, file: BinaryIO | gzip.GzipFile | None) -> bytes:
        try:
            if file is not None:
                return file.read(CHUNK)
            await ready(self._fd, writing=False)
            return os.read(self._fd, CHUNK)
        except OSError as problem:
            raise SpmdError(f"the input {self.name} cannot be read further: {problem.strerror}") from problem

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


async def ready(fd: int, *, writing: bool) -> None:
    """Wait, without holding up the event loop, until a pipe can be read or takes 4 kB. At once for a file."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    try:
        (loop.add_writer if writing else loop.add_reader)(fd, wake)
    except PermissionError:  # epoll takes no regular files, and they never make one wait
        return
    try:
        await woken
    finally:
        (loop.remove_writer if writing else loop.remove_reader)(fd)


def _fingerprint(content: BinaryIO | gzip.GzipFile) -> InputFingerprint:
    digest, size, count = hashlib.sha256(), 0, 0
    with content as file:
        for line in file:
            digest.update(line)
            if size == 0:
                size, count = len(line), int(bool(line.removeprefix(_BOM).strip()))
                continue
            size += len(line)
            count += not line.isspace()
    return InputFingerprint(size, digest.hexdigest(), count)


def _fetch(url: str, spool_dir: str | None) -> int:
    try:
        with (
            tempfile.TemporaryFile(dir=spool_dir) as spool,
            urllib.request.urlopen(url, timeout=URL_TIMEOUT_S) as answer,
        ):
            shutil.copyfileobj(answer, spool, CHUNK)
            spool.flush()
            wanted = answer.headers.get("Content-Length") or ""
            if wanted.isdigit() and int(wanted) != spool.tell():
                raise UsageError(f"the input {url} ended early: {spool.tell()} of {wanted} bytes")
            return os.dup(spool.fileno())
    except (OSError, HTTPException) as problem:
        raise UsageError(f"the input {url} cannot be fetched: {problem}") from problem
