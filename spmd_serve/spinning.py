"""How long readers of a host's ring poll before they sleep: a matter of spare cores and who shares them."""

from pathlib import Path

from spmd_serve.topology import Cluster, RankInfo

_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_CGROUP = Path("/proc/self/cgroup")

SPARE_CORES = 2
"""What the driver and the API server need beside the ranks, if all of them may spin."""


def who_spins(cluster: Cluster, me: RankInfo, cores: int, *, autogrouped: bool) -> tuple[bool, bool]:
    """Whether the driver, and whether the ranks of this machine, poll for a second after each message.

    With cores to spare, polling is the fastest. Without, a rank that polls takes its core from its driver and
    its neighbours, so it sleeps. A driver that polls (and yields) still pays then, as it keeps cores awake
    between the many short waits of a step, but only in one scheduling group with its ranks: across groups a
    yield is none, and it costs a rank a whole time slice (measured: docs/benchmarks.md).
    """
    ranks = sum(info.machine_id == me.machine_id for info in cluster.ranks)
    if cores - ranks >= SPARE_CORES:
        return True, True
    return not autogrouped, False


def is_autogrouped(autogroup: Path = _AUTOGROUP, cgroup: Path = _CGROUP) -> bool:
    """Whether Linux makes each session (torchrun: each rank) a scheduling group of its own.

    It does so where it is enabled and the process is in the root CPU cgroup, thus not in a container.
    """
    try:
        if autogroup.read_text().strip() != "1":
            return False
        entries = [line.split(":", 2) for line in cgroup.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    paths = {path for number, names, path in entries if "cpu" in names.split(",") or number == "0"}
    return paths <= {"/"}
