"""Which cores a rank computes on: its part of what its host lets it use. Standard library only."""

import math
import os
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path

from spmd_serve.system.torchrun_env import TorchrunEnv
from spmd_serve.topology import Cluster, RankInfo, ranges

THREADS = "OMP_NUM_THREADS"
_SYSFS = Path("/sys/devices/system/cpu")
_CGROUP_FILE = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def share(allowed: Sequence[int], index: int, count: int) -> list[int]:
    """Part `index` of `count` of the allowed cores, neighbours together; the first get what does not divide.

    Empty when there are more ranks than cores: then leave the rank unbound, with one thread.
    """
    if count > len(allowed):
        return []
    size, extra = divmod(len(allowed), count)
    start = index * size + min(index, extra)
    return list(allowed[start : start + size + (index < extra)])


def physical_cores(allowed: Iterable[int], sysfs: Path = _SYSFS) -> list[int]:
    """One logical CPU of each physical core among `allowed`: hyperthreads add nothing to matrix products.

    All of `allowed` where the system does not say which belong together.
    """
    cores: list[int] = []
    taken: set[int] = set()
    for cpu in sorted(allowed):
        if cpu not in taken:
            cores.append(cpu)
        try:
            taken |= set(parse_cpus((sysfs / f"cpu{cpu}/topology/thread_siblings_list").read_text()))
        except (OSError, ValueError):
            taken.add(cpu)
    return cores


def cpu_quota(cgroup_file: Path = _CGROUP_FILE, root: Path = _CGROUP_ROOT) -> float | None:
    """CPUs' worth of time that this process's cgroup (version 2) or one above it grants; None: no limit."""
    try:
        entries = [line.split(":", 2) for line in cgroup_file.read_text().splitlines()]
    except OSError:
        return None
    path = next((path for number, _, path in entries if number == "0"), "/")
    folder = root / path.strip("/")
    quotas = []
    for level in (folder, *folder.parents):
        if level != root and root not in level.parents:
            break
        try:
            quota, period = (level / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue  # no such file at the root, "max" where there is no limit
    return min(quotas, default=None)


def lent(quota: float | None = None) -> int:
    """How many CPUs this process and its neighbours may use: its affinity, within the cgroup's quota."""
    quota = cpu_quota() if quota is None else quota
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else min(allowed, math.ceil(quota))


def prepare_environ(
    env: TorchrunEnv,
    environ: MutableMapping[str, str],
    *,
    sysfs: Path = _SYSFS,
    quota: float | None = None,
) -> list[int]:
    """Set OMP_NUM_THREADS to the size of the rank's share of its host's cores, and return that share.

    Call before torch is imported: it reads the variable then. torchrun sets it to 1 where it is unset and
    several ranks start, which can't be told from a user's own 1, so that 1 is replaced; any other value of a
    user stays. A cgroup's CPU quota (`quota` CPUs, default: as the system says) caps the threads of all ranks
    of the host.
    """
    count = env.local_world_size
    mine = share(physical_cores(os.sched_getaffinity(0), sysfs), env.local_rank, count)
    quota = cpu_quota() if quota is None else quota
    threads = max(len(mine), 1)
    if quota is not None:
        threads = min(threads, max(math.ceil(quota / count), 1))
    given = environ.get(THREADS, "")
    if not given or (given == "1" and count > 1):
        environ[THREADS] = str(threads)
    return mine


def machine_share(
    cluster: Cluster, me: RankInfo, allowed: Sequence[int], *, sysfs: Path = _SYSFS
) -> list[int]:
    """This rank's share once all are known: several agents of one machine share its cores among their ranks.

    Ranks whose allowed CPUs do not overlap with ours (other cpusets, `torchrun --numa-binding`) take nothing
    away.
    """
    cores = physical_cores(allowed, sysfs)
    rivals = [
        info.rank
        for info in cluster.ranks
        if info.machine_id == me.machine_id
        and (info.rank == me.rank or not info.cpus or set(parse_cpus(info.cpus)) & set(allowed))
    ]
    return share(cores, rivals.index(me.rank), len(rivals))


def memory_rivals(cluster: Cluster, me: RankInfo, *, sysfs: Path = _SYSFS) -> int:
    """How many ranks, this one included, compute on the NUMA node of this rank's machine on which it does."""
    mine = _numa_node(cluster, me, sysfs)
    return sum(
        _numa_node(cluster, info, sysfs) == mine for info in cluster.ranks if info.machine_id == me.machine_id
    )


def _numa_node(cluster: Cluster, info: RankInfo, sysfs: Path) -> str:
    """That of the first core of a rank of this machine; empty where the system does not say."""
    allowed = parse_cpus(info.cpus)
    first = next(iter(machine_share(cluster, info, allowed, sysfs=sysfs) or allowed), None)
    return next((path.name for path in sysfs.glob(f"cpu{first}/node*")), "")


def bind(cores: Sequence[int]) -> None:
    """Bind every thread of this process to `cores`; nothing for an empty list. Threads to come inherit it."""
    if not cores:
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it ended meanwhile


def parse_cpus(text: str) -> list[int]:
    """ "0-2,8" -> [0, 1, 2, 8]."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        numbers.extend(range(int(low), int(high or low) + 1))
    return numbers


def format_cpus(cpus: Iterable[int]) -> str:
    """The inverse of parse_cpus."""
    return ranges(cpus, ",")
