"""Facts from /proc about processes (state, CPU time, exit status) and about the kernel's OOM killer."""

import os
from pathlib import Path
from typing import NamedTuple

from spmd_serve.system.process import Ending, reaped_ending

_PF_EXITING = 0x4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcStat(NamedTuple):
    """The fields of /proc/<pid>/stat that the watcher uses.

    Attributes:
        state: the state letter.
        dying: whether the process has ended or is about to.
        cpu_s: CPU seconds used so far, of all threads.
        started_ticks: start time, in kernel ticks since boot.
        wait_status: the exit status of an ended process, as wait(2) encodes it.
    """

    state: str
    dying: bool
    cpu_s: float
    started_ticks: int
    wait_status: int

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped, by a signal or by a debugger."""
        return self.state in ("T", "t")


def parse_stat(text: bytes) -> ProcStat:
    """Parse a line of /proc/<pid>/stat; the command name in it may contain spaces and parentheses."""
    words = text[text.rindex(b")") + 2 :].split()
    state = words[0].decode()
    return ProcStat(
        state=state,
        dying=state in "ZXx" or bool(int(words[6]) & _PF_EXITING),
        cpu_s=(int(words[11]) + int(words[12])) / _TICKS_PER_S,
        started_ticks=int(words[19]),
        wait_status=int(words[49]) if len(words) > 49 else 0,
    )


class ProcFile:
    """An open /proc/<pid>/stat: cheap to read repeatedly, and safe against reuse of the pid."""

    def __init__(self, pid: int) -> None:
        """Open the file. Raises OSError if the process is gone."""
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> ProcStat | None:
        """Return the current fields, or None if the process is gone and reaped."""
        try:
            return parse_stat(os.pread(self._fd, 1024, 0))
        except (ProcessLookupError, ValueError):
            return None

    def close(self) -> None:
        """Close the file; call it once."""
        os.close(self._fd)


def ending_of(pidfd: int, stat: ProcFile) -> Ending | None:
    """Return how an ended process ended, or None if this kernel tells that only to its parent."""
    look = stat.read()
    if look is not None and look.dying:
        return Ending.of_wait_status(look.wait_status)
    return reaped_ending(pidfd)


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for that signal; without one the signal may end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def started_ticks(pid: int) -> int:
    """Return when a process started, in kernel ticks since boot; 0 if unknown.

    Pid and start time together identify a process even after its pid is reused.
    """
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).started_ticks
    except (OSError, ValueError):
        return 0


class OomCounter:
    """Detects activity of the kernel's OOM killer, in this cgroup or else on the whole machine."""

    def __init__(self, files: list[Path] | None = None) -> None:
        self._files = _oom_files() if files is None else files
        self._seen = self._count()

    def has_risen(self) -> bool:
        """Return whether the OOM killer has killed a process since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        for file in self._files:
            try:
                lines = file.read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0


def _oom_files() -> list[Path]:
    """Return the files that may hold the counter: cgroup v2's memory.events, then the machine's vmstat."""
    files = [Path("/proc/vmstat")]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                files.insert(0, Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events")
    except OSError:
        pass
    return files
