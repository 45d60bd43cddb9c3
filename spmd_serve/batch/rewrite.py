"""Replacing an output and its state by rewritten ones, so that a crash leaves both old or both new.

Two renames can't be one. So the new state names the new output, its rename decides, and whoever opens the
output next makes up for the other rename where a crash came between.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape, glob
from uuid import uuid4

from spmd_serve.batch.lock import try_lock
from spmd_serve.batch.records import HOLDER_SIZE, RECORD_SIZE, Record, StateHeader

_BUFFER = 1 << 20


@dataclass(frozen=True)
class Rewritten:
    """Open descriptors of the new files, and where they end; records begin at byte `start` of the state."""

    out: int
    state: int
    out_end: int
    start: int
    state_end: int


def rewrite(
    path: str, out: int, state: int, header: StateHeader, pieces: Iterable[tuple[Record, int]]
) -> Rewritten:
    """Write the lines of `out` that `pieces` name (with their offsets) to new files, and put these in place.

    The new state is locked before anybody can find it. Raises OSError (no room, say); then nothing has
    changed.
    """
    header = replace(header, swap=uuid4().hex[:8])
    new_out, new_state = f"{path}.{header.swap}.new", f"{path}.state.new"
    fds: list[int] = []
    try:
        for name in (new_out, new_state):
            fds.append(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        out_fd, state_fd = fds
        try_lock(state_fd)
        top = os.pread(state, HOLDER_SIZE, 0) + header.encode()
        out_end, state_end = 0, len(top)
        with (
            open(out_fd, "wb", buffering=_BUFFER, closefd=False) as out_file,
            open(state_fd, "wb", buffering=_BUFFER, closefd=False) as state_file,
        ):
            state_file.write(top)
            for record, offset in pieces:
                out_file.write(os.pread(out, record.length, offset))
                state_file.write(record.pack())
                out_end += record.length
                state_end += RECORD_SIZE
        os.fsync(out_fd)
        os.fsync(state_fd)
        os.rename(new_state, path + ".state")
    except BaseException:
        for fd in fds:
            os.close(fd)
        for name in (new_out, new_state):
            with suppress(OSError):
                os.unlink(name)
        raise
    try:
        finish(path, header)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return Rewritten(out_fd, state_fd, out_end, len(top), state_end)


def finish(path: str, header: StateHeader) -> bool:
    """Do the second rename where it is due, and remove what a rewrite that came to nothing has left.

    Whether the output was replaced.
    """
    replaced = False
    for name in leftovers(path):
        if name == f"{path}.{header.swap}.new":
            os.rename(name, path)
            replaced = True
        else:
            os.unlink(name)
    sync_directory(path)
    return replaced


def leftovers(path: str) -> list[str]:
    """Files of rewrites that did not end."""
    return [*glob(escape(path) + "." + "[0-9a-f]" * 8 + ".new"), *glob(escape(path) + ".state.new")]


def sync_directory(path: str) -> None:
    """Make the names of new files durable."""
    fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
