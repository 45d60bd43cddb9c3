"""The processes, shared memory and ports of a running job, and checks that all are gone after its end."""

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.processes import Process, assert_gone, descendants, is_tracker, look, survivors
from harness.waiting import wait_until

SHARED = Path("/dev/shm")
TIDY_S = 5.0  # for processes that only clean up after others: multiprocessing's resource tracker
BUSY_POLL_S = 3.0
END_S = 25.0  # 2 to 3 s on an idle machine; another file of tests may run too
LISTEN = "0A"  # in /proc/net/tcp


@dataclass(frozen=True)
class Footprint:
    """A job's processes, its names in /dev/shm, and the TCP ports that it listens on.

    A port is identified by its socket's inode too: another job may use the same number, also in another
    network namespace.
    """

    processes: tuple[Process, ...]
    shared: frozenset[str]
    ports: frozenset[tuple[int, str]]

    @classmethod
    def of(cls, *roots: int) -> Self:
        """Record everything at and below the processes `roots` now."""
        processes = [process for root in roots for process in (look(root), *descendants(root)) if process]
        pids = [process.pid for process in processes]
        shared = {name for pid in pids for name in _shared_of(pid)}
        ports = {port for pid in pids for port in _listening(pid)}
        return cls(tuple(processes), frozenset(shared), frozenset(ports))

    def assert_gone(self, deadline_s: float) -> None:
        """Wait until no process runs, then until nothing is left; AssertionError names what is left."""
        workers = [process for process in self.processes if not is_tracker(process)]
        assert_gone(workers, deadline_s)
        assert_gone(self.processes, TIDY_S)
        wait_until(lambda: not self.left(), TIDY_S, f"the end of {self.shared}")
        # A process may look dead while its last thread, which keeps its files open, still ends.
        wait_until(lambda: not self.ports & set(_listeners("self")), TIDY_S, f"the end of {self.ports}")

    def socket_files(self) -> set[Path]:
        """Return the files of local sockets that its processes hold now, in the test's network namespace."""
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        named = {f"socket:[{line[6]}]": Path(line[7]) for line in lines if line[7:] and line[7][0] == "/"}
        held = {target for process in self.processes for target in _descriptors_of(process.pid)}
        return {path for socket, path in named.items() if socket in held}

    def left(self) -> set[str]:
        """Return the names in /dev/shm that still exist."""
        return {name for name in self.shared if (SHARED / name).exists()}

    def seconds_to_end(self, deadline_s: float = END_S) -> float:
        """Return the seconds from now until all processes have ended; AssertionError after the deadline."""
        started = time.monotonic()
        workers = [process for process in self.processes if not is_tracker(process)]
        try:
            wait_until(lambda: not survivors(workers), deadline_s, "the end of the job")
        except AssertionError as late:
            names = ", ".join(str(process) for process in survivors(workers))
            raise AssertionError(f"{late}: still there: {names}") from None
        return time.monotonic() - started


def idle_cpu(pids: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Return the share of one core that each named process uses during so many seconds.

    First wait until vLLM's rings have stopped to busy-poll, which they do for a second after a message.
    """
    time.sleep(BUSY_POLL_S)
    before, started = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(seconds)  # the measurement itself
    span = time.monotonic() - started
    return {name: (cpu_seconds(pid) - before[name]) / span for name, pid in pids.items()}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _shared_of(pid: int) -> set[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(re.findall(rf" {SHARED}/(\S+)$", maps, re.MULTILINE))


def ports_of(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens, in its network namespace."""
    return {port for port, _ in _listening(pid)}


def _listening(pid: int) -> set[tuple[int, str]]:
    """Return port and inode of the TCP sockets on which a process listens, in its network namespace."""
    targets = _descriptors_of(pid)
    with contextlib.suppress(OSError):
        return {(port, inode) for port, inode in _listeners(pid) if f"socket:[{inode}]" in targets}
    return set()


def _descriptors_of(pid: int) -> list[str]:
    targets = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # closed meanwhile
                targets.append(os.readlink(entry))
    return targets


def _listeners(pid: int | str) -> list[tuple[int, str]]:
    """Return port and inode of all listening TCP sockets in a process's network namespace."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [(int(line[1].rpartition(":")[2], 16), line[9]) for line in lines if line[3] == LISTEN]
