"""What a measurement needs to know of the machine and of processes, from /proc."""

import contextlib
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.processes import Process

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PLACEMENT = ("OMP_", "GOMP_", "KMP_", "VLLM_CPU_", "CUDA_VISIBLE_DEVICES", "GLOO_", "LD_PRELOAD")


def describe() -> dict[str, str]:
    """Machine, versions and commit, for the head of a report."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    memory = Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} cores usable",
        "memory": f"{int(memory) / 2**20:.0f} GiB",
        "GPU": run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").replace("\n", ", ") or "none",
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "torch": package("torch"),
        "vLLM": package("vllm", "vllm-cpu"),
        "commit": commit(),
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }


def package(*names: str) -> str:
    """The version of the first of these distributions that is installed."""
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return f"{version(name)} ({name})"
    return "not installed"


def commit() -> str:
    """The checkout's commit, marked where files differ from it."""
    head = run("git", "rev-parse", "--short=12", "HEAD")
    return f"{head or 'none'}{' with changes' if run('git', 'status', '--porcelain') else ''}"


def run(*command: str) -> str:
    """What a command prints; nothing where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds: all cores together, busy and stolen by other virtual machines; this process; and a clock."""

    busy: float
    stolen: float
    own: float
    when: float

    @classmethod
    def now(cls) -> "CpuTimes":
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _, _, irq, softirq, steal = fields[:8]
        busy = (user + nice + system + irq + softirq) / TICKS_PER_S
        return cls(busy, steal / TICKS_PER_S, time.process_time(), time.perf_counter())


def cpu_seconds(process: Process, *, reaped: bool = False) -> float:
    """User and system time of a process, with `reaped` also that of its ended children; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return sum(int(field) for field in fields[11 : 15 if reaped else 13]) / TICKS_PER_S


def pss_mib(process: Process) -> float:
    """Proportional set size: shared pages are divided among those who map them."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def label(process: Process) -> str:
    """A short name: the module or title, and torchrun's rank where it has one."""
    words = process.command.split()
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    name = " ".join(words[:2] if words[:1] == ["-m"] else words)[:60]
    if "resource_tracker" in name:
        name = "multiprocessing's resource tracker"
    rank = process.environ().get("RANK")
    return f"{name} (RANK {rank})" if rank is not None else name


def placement(process: Process) -> tuple[dict[str, int], dict[str, str]]:
    """How many threads may run on which cores, and the variables of its start that decide about threads."""
    cores: Counter[str] = Counter()
    for task in _tasks(process):
        with contextlib.suppress(OSError, IndexError):
            status = (task / "status").read_text()
            cores[status.split("Cpus_allowed_list:")[1].split()[0]] += 1
    named = {name: value for name, value in process.environ().items() if name.startswith(PLACEMENT)}
    return dict(cores), named


def _tasks(process: Process) -> Iterable[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{process.pid}/task").iterdir())
    return []


def has_cuda() -> bool:
    """Whether this machine shows an NVIDIA GPU."""
    return Path("/dev/nvidia0").exists() or bool(run("nvidia-smi", "-L"))
