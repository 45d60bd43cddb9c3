"""What the kernel tells about a process without asking it: /proc/<pid>/stat, and the OOM killer's counter."""

import os
from pathlib import Path
from typing import NamedTuple

from spmd_serve.system.process import Ending, reaped_ending

_PF_EXITING = 0x4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcStat(NamedTuple):
    """One look: state letter, whether it is ending, CPU seconds, start time, wait status of an ended one."""

    state: str
    dying: bool
    cpu_s: float
    started_ticks: int
    wait_status: int

    @property
    def stopped(self) -> bool:
        """By a signal, or by a debugger."""
        return self.state in ("T", "t")


def parse_stat(text: bytes) -> ProcStat:
    """Parse a line of /proc/<pid>/stat; the command name in it may hold spaces and parentheses."""
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
    """An open /proc/<pid>/stat: cheap to read again, and never another process's that got the same pid."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when the process is gone."""
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> ProcStat | None:
        """None when the process is gone and reaped."""
        try:
            return parse_stat(os.pread(self._fd, 1024, 0))
        except (ProcessLookupError, ValueError):
            return None

    def close(self) -> None:
        """Once."""
        os.close(self._fd)


def ending_of(pidfd: int, stat: ProcFile) -> Ending | None:
    """How an ended process ended; None where the kernel tells only its parent."""
    look = stat.read()
    if look is not None and look.dying:
        return Ending.of_wait_status(look.wait_status)
    return reaped_ending(pidfd)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for that signal; sending it to one that has none would end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def started_ticks(pid: int) -> int:
    """When a process was started (kernel ticks since boot): with its pid a name for ever; 0: unknown."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).started_ticks
    except (OSError, ValueError):
        return 0


class OomCounter:
    """Notices that the kernel's OOM killer has been at work, in this cgroup or else on the machine."""

    def __init__(self, files: list[Path] | None = None) -> None:
        self._files = _oom_files() if files is None else files
        self._seen = self._count()

    def has_risen(self) -> bool:
        """Whether it has killed since the last call."""
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
    """Where the counter is: cgroup v2's memory.events (the root has none), or the whole machine's."""
    files = [Path("/proc/vmstat")]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                files.insert(0, Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events")
    except OSError:
        pass
    return files
