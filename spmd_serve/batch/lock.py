"""One run at a time on an output: a lock on its state file, which says who holds it.

The lock is flock(2): it ends with the process, however that ends, and forked children share it. Over NFS,
Linux turns it into a lock of the server, so it holds between hosts too; a mount with local_lock=flock or
nolock makes it hold inside one host only, and then two hosts must not be started on one output.
"""

import fcntl
import os
import time
from datetime import UTC, datetime

from spmd_serve.batch.records import HOLDER_SIZE, Holder
from spmd_serve.errors import UsageError
from spmd_serve.system.network import host_name

GRACE_S = 3.0
"""Seconds to wait for a holder that may be dying: torchrun starts a new run as soon as it killed the old."""

RETRY_INTERVAL_S = 0.1


def open_locked(path: str, output: str, grace_s: float = GRACE_S) -> int:
    """Open (or create) the state file and lock it. Raises UsageError naming who else has it."""
    give_up = time.monotonic() + grace_s
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            raise UsageError(
                f"{path} (the state of the output) cannot be written: {problem.strerror}"
            ) from problem
        try:
            if try_lock(fd):
                if _is_at(fd, path):
                    return fd
            elif time.monotonic() >= give_up:
                holder = Holder.decode(os.pread(fd, HOLDER_SIZE, 0))
                who = f" ({holder})" if holder is not None else ""
                raise UsageError(
                    f"{output} is being written by another run{who}: let it end, or name another -o"
                )
        except OSError as problem:
            os.close(fd)
            raise UsageError(f"{path} cannot be locked: {problem.strerror}") from problem
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(RETRY_INTERVAL_S)


def try_lock(fd: int) -> bool:
    """Whether the lock is ours now. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Also when a forked child still has the file open."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def this_process(job: str) -> Holder:
    """Us, as a holder."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(os.getpid(), host_name(), since, job)


def _is_at(fd: int, path: str) -> bool:
    """Whether the locked file is still the one that others will open (a rewritten state replaces it)."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
