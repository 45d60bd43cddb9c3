"""What Linux offers to processes that must not outlive each other: parent-death signals and pidfds."""

import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import threading
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, struct pidfd_info of 64 bytes), Linux 6.13; exit information since 6.15."""
_PIDFD_INFO_EXIT = 1 << 3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_forking_parent = 0
_forked_by_main_thread = True
_children_hook_installed = False


def die_with_parent(expected_parent: int | None) -> None:
    """Have the kernel SIGKILL this process as soon as its parent is gone, whatever ended the parent.

    `expected_parent` is the pid that the caller knows as its parent: when that one is gone already, this
    process ends here. None: whoever is the parent now. "Parent" is the *thread* that forked, so a process
    that sets this must have been started by a thread that lives as long as its process (the main thread).
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected_parent is not None and os.getppid() != expected_parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent` in a child that must first tell others of its parent's death.

    If it is stopped then, the kernel wakes it up (SIGCONT), so that it does not stay for ever.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def die_with_parent_in_children() -> None:
    """From now on every child of os.fork (multiprocessing's too) dies with this process. Idempotent.

    A child forked by another thread than the main one would die with that thread: it gets a thread that waits
    for the parent's end instead, which needs the GIL and so is less prompt.
    """
    global _children_hook_installed
    if _children_hook_installed:
        return
    _children_hook_installed = True
    os.register_at_fork(before=_note_parent, after_in_child=_tie_to_parent)


def _note_parent() -> None:
    global _forking_parent, _forked_by_main_thread
    _forking_parent = os.getpid()
    # Asked before the fork: in the child the forking thread is the main thread.
    _forked_by_main_thread = threading.get_native_id() == _forking_parent


def _tie_to_parent() -> None:
    if _forked_by_main_thread:
        die_with_parent(_forking_parent)
        return
    try:
        parent = os.pidfd_open(_forking_parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_die_after, args=(parent,), name="die-with-parent", daemon=True).start()


def _die_after(parent: int) -> None:
    wait_readable(parent, None)
    os.kill(os.getpid(), signal.SIGKILL)


def set_process_name(name: str) -> None:
    """The name that `ps -o comm` and `top` show; the kernel keeps 15 bytes."""
    text = ctypes.create_string_buffer(name.encode())
    _prctl(_PR_SET_NAME, ctypes.addressof(text))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


class Ending(NamedTuple):
    """How a process ended: by a signal, or with an exit code."""

    code: int | None
    signal: int | None

    @classmethod
    def of_wait_status(cls, status: int) -> "Ending":
        """From the 16 bit status that wait(2) and /proc show."""
        number = status & 0x7F
        return cls(None, number) if number else cls((status >> 8) & 0xFF, None)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that stands for this very process, even when its pid comes again; None: it is gone.

    Becomes readable when the process (with all its threads) has ended.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def has_ended(pidfd: int) -> bool:
    """Whether the process behind `pidfd` has ended, reaped or not."""
    return wait_readable(pidfd, 0)


def wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Wait until `descriptor` (also above select's 1024) is readable; False after `timeout_s` seconds."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


def send_signal(pidfd: int, number: int) -> bool:
    """Send a signal to exactly that process; False when it is gone."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def reaped_ending(pidfd: int) -> Ending | None:
    """How a process that its parent has reaped ended; None while it is not, or on kernels before 6.15."""
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info, True)
    except OSError as refused:
        if refused.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH, errno.EPERM):
            return None
        raise
    if not struct.unpack_from("Q", info, 0)[0] & _PIDFD_INFO_EXIT:
        return None
    return Ending.of_wait_status(struct.unpack_from("i", info, 60)[0])
