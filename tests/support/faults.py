"""What goes wrong in production, done on purpose: deaths, freezes, by pid."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import Process, descendants, look, wait_exit
from tests.support.waiting import wait_until

STUCK_TOKENS = 777
"""A request for so many tokens hangs an engine core with `tests.support.stuck_scheduler`."""


def kill_nine(pid: int, deadline_s: float = 5.0) -> None:
    """SIGKILL, and waits until the kernel has ended it."""
    os.kill(pid, signal.SIGKILL)
    assert wait_exit(pid, deadline_s), f"{pid} survived SIGKILL for {deadline_s:g} s"


def freeze(pid: int) -> None:
    """SIGSTOP, and waits until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(pid) in "T", 5.0, f"{pid} to stand still")


def thaw(pid: int) -> None:
    """SIGCONT; nothing where it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Frozen inside the block, going on after it whatever happens there."""
    freeze(pid)
    try:
        yield
    finally:
        thaw(pid)


def rank_processes(root: int) -> dict[int, Process]:
    """torchrun's rank -> its process, for the agent(s) at or below the process `root`.

    A rank's own children inherit its environment, so a rank is who has RANK and whose parent has not.
    """
    found: dict[int, Process] = {}
    for process in descendants(root):
        rank = process.environ().get("RANK")
        parent = look(process.parent)
        if rank is not None and parent is not None and "RANK" not in parent.environ():
            found[int(rank)] = process
    return found


def watcher_below(root: int) -> int:
    """The pid of the host's watcher, for the one agent or lone rank `root`."""
    names = {process.pid: Path(f"/proc/{process.pid}/comm").read_text() for process in descendants(root)}
    (pid,) = (pid for pid, name in names.items() if name.strip() == "spmd-watcher")
    return pid


def pid_of_rank(root: int, rank: int, deadline_s: float = 30.0) -> int:
    """The pid of torchrun's rank `rank` below the process `root`, waiting for it to start."""
    return wait_until(lambda: rank_processes(root).get(rank), deadline_s, f"rank {rank} below {root}").pid


def state(pid: int) -> str:
    """The letter of /proc: R runs, S sleeps, T stands still, Z is dead; ? where there is nobody."""
    process = look(pid)
    return process.state if process is not None else "?"
