"""Faults as in production, made on purpose and by pid: SIGKILL and SIGSTOP."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from harness.processes import Process, descendants, look, wait_exit
from harness.waiting import wait_until

STUCK_TOKENS = 777
"""A request for this many tokens hangs an engine core with `tests.support.stuck_scheduler`."""


def kill_nine(pid: int, deadline_s: float = 5.0) -> None:
    """Send SIGKILL and wait until the process has ended."""
    os.kill(pid, signal.SIGKILL)
    assert wait_exit(pid, deadline_s), f"{pid} survived SIGKILL for {deadline_s:g} s"


def freeze(pid: int) -> None:
    """Send SIGSTOP and wait until the process is stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(pid) in "T", 5.0, f"{pid} to stop")


def thaw(pid: int) -> None:
    """Send SIGCONT, unless the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop the process inside the block and continue it afterwards."""
    freeze(pid)
    try:
        yield
    finally:
        thaw(pid)


def rank_processes(root: int) -> dict[int, Process]:
    """Return the process of each torchrun rank, for the agent(s) at or below the process `root`.

    A rank's children inherit its environment, so a rank is a process with RANK whose parent has no RANK.
    """
    found: dict[int, Process] = {}
    for process in descendants(root):
        rank = process.environ().get("RANK")
        parent = look(process.parent)
        if rank is not None and parent is not None and "RANK" not in parent.environ():
            found[int(rank)] = process
    return found


def watcher_below(root: int) -> int:
    """Return the pid of the node's watcher, given its agent or single rank `root`."""
    names = {process.pid: Path(f"/proc/{process.pid}/comm").read_text() for process in descendants(root)}
    (pid,) = (pid for pid, name in names.items() if name.strip() == "spmd-watcher")
    return pid


def pid_of_rank(root: int, rank: int, deadline_s: float = 30.0) -> int:
    """Wait for torchrun rank `rank` below the process `root` to start; return its pid."""
    return wait_until(lambda: rank_processes(root).get(rank), deadline_s, f"rank {rank} below {root}").pid


def state(pid: int) -> str:
    """Return the state letter of /proc (R, S, T stopped, Z dead), or "?" if there is no such process."""
    process = look(pid)
    return process.state if process is not None else "?"
