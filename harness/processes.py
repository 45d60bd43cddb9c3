"""Processes as /proc shows them: descendants, survivors, exits."""

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.waiting import wait_until


@dataclass(frozen=True)
class Process:
    """A process, identified by its pid and its start time (clock ticks since boot)."""

    pid: int
    parent: int
    started: int
    state: str
    command: str

    def alive(self) -> bool:
        """Return whether it still runs; a zombie (dead, not yet waited for) does not."""
        now = look(self.pid)
        return now is not None and now.started == self.started and now.state not in "ZX"

    def environ(self) -> dict[str, str]:
        """Return the environment that it was started with; empty if it is gone."""
        with contextlib.suppress(OSError):
            raw = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace")
            return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
        return {}

    def signal(self, number: int) -> None:
        """Send a signal to this process, but not to a later one with the same pid."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __str__(self) -> str:
        return f"{self.pid} ({self.command or '?'})"


def look(pid: int) -> Process | None:
    """Return the process with this pid, or None."""
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
    """Return all descendants of a process at this moment, parents first, without zombies."""
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
    """Wait until none of the processes runs; else kill the remaining ones and raise AssertionError."""
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
    """Kill all processes except multiprocessing's resource trackers, which clean up and then end."""
    for process in processes:
        if not is_tracker(process):
            process.signal(signal.SIGKILL)


def is_tracker(process: Process) -> bool:
    return "multiprocessing.resource_tracker" in process.command


def wait_exit(pid: int, deadline_s: float) -> bool:
    """Return whether the process has ended in time, without the delay of polling."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], deadline_s)
    finally:
        os.close(descriptor)
    return bool(ready)
