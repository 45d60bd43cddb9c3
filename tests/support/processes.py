"""Processes as /proc shows them: who descends from whom, who is still there."""

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Process:
    """One process, told apart from a later one with its pid by the start time (clock ticks since boot)."""

    pid: int
    parent: int
    started: int
    state: str
    command: str

    def alive(self) -> bool:
        """Whether it still runs; a zombie (dead, not yet waited for) does not."""
        now = look(self.pid)
        return now is not None and now.started == self.started and now.state not in "ZX"

    def environ(self) -> dict[str, str]:
        """The environment that it was started with; empty where it is gone."""
        with contextlib.suppress(OSError):
            raw = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace")
            return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
        return {}

    def signal(self, number: int) -> None:
        """Sends a signal to this process, never to a later one with its pid."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __str__(self) -> str:
        return f"{self.pid} ({self.command or '?'})"


def look(pid: int) -> Process | None:
    """What /proc says of a pid; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()  # from field 3 on: the name before it may hold spaces and brackets
    return Process(pid, int(fields[1]), int(fields[19]), fields[0], command[:200] or name)


def everybody() -> list[Process]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [process for pid in pids if (process := look(pid)) is not None]


def descendants(pid: int) -> list[Process]:
    """A snapshot of all children of a process, their children, and so on: parents first, zombies left out."""
    children: dict[int, list[Process]] = {}
    for process in everybody():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    frontier = [pid]
    while frontier:
        parent = frontier.pop(0)
        for child in children.get(parent, []):
            found.append(child)
            frontier.append(child.pid)
    return [process for process in found if process.state not in "ZX"]


def survivors(processes: Iterable[Process]) -> list[Process]:
    return [process for process in processes if process.alive()]


def assert_gone(processes: Iterable[Process], deadline_s: float) -> None:
    """Waits until none of the processes runs any more; DeadlineError names those that do, and ends them."""
    snapshot = list(processes)
    names = ", ".join(str(process) for process in snapshot)
    try:
        wait_until(lambda: not survivors(snapshot), deadline_s, f"the end of {names}")
    except AssertionError as error:
        left = survivors(snapshot)
        kill(left)
        still = ", ".join(str(process) for process in left)
        raise AssertionError(f"still there after {deadline_s:g} s: {still}") from error


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL for all but resource trackers (multiprocessing), which remove what others leave, and end."""
    for process in processes:
        if not is_tracker(process):
            process.signal(signal.SIGKILL)


def is_tracker(process: Process) -> bool:
    return "multiprocessing.resource_tracker" in process.command


def wait_exit(pid: int, deadline_s: float) -> bool:
    """Whether the process ended in time; the kernel wakes us, so measurements carry no polling delay."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], deadline_s)
    finally:
        os.close(descriptor)
    return bool(ready)
