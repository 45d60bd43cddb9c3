"""How long readers of a host's ring poll before they sleep: a matter of spare cores and who shares them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_serve.topology import Cluster, RankInfo

_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_CGROUP = Path("/proc/self/cgroup")

SPARE_CORES = 2
"""What the driver and the API server need beside the ranks, if all of them may spin."""


@dataclass(frozen=True)
class Polling:
    """Who polls for a second after each message, and where."""

    driver: bool
    ranks: bool
    driver_cores: tuple[int, ...] = ()
    """Cores that the driver has to keep to, as it polls; empty: any."""


def who_polls(
    cluster: Cluster, me: RankInfo, cores: int, *, drives: int, autogrouped: bool, mine: Sequence[int]
) -> Polling:
    """Whether the driver, and whether the ranks of this machine, poll for the next message.

    `cores`: how many the machine lends; `mine`: those of rank `me`; `drives`: replicas behind its endpoint.
    With cores to spare, polling is the fastest. Without, a rank that polls takes its core from its driver and
    its neighbours, so it sleeps. A driver that polls (and yields) still pays then, as it keeps a core awake
    between the many short waits of a step, but only in one scheduling group with who computes there: across
    groups a yield is none, and it costs a rank a whole time slice (measured: docs/benchmarks.md). Where Linux
    makes such groups, the driver is in that of the rank that forked it, and polls on that rank's cores only.
    """
    ranks = sum(info.machine_id == me.machine_id for info in cluster.ranks)
    if cores - ranks >= SPARE_CORES:
        return Polling(driver=True, ranks=True)
    if not autogrouped:
        return Polling(driver=True, ranks=False)
    if drives == 1 and mine:
        return Polling(driver=True, ranks=False, driver_cores=tuple(mine))
    return Polling(driver=False, ranks=False)


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
