"""Whether readers of a host's ring poll before they sleep: a matter of spare cores."""

from spmd_serve.topology import Cluster, RankInfo

SPARE_CORES = 2
"""What the driver and the API server need beside the ranks, if all of them may spin."""


def may_busy_poll(cluster: Cluster, me: RankInfo, cores: int) -> bool:
    """Whether drivers and ranks of this machine poll for a second after each message, as vLLM's do.

    `cores`: how many the machine lends. With some to spare, polling is the fastest. Without, who polls takes
    a core from who computes (measured: docs/benchmarks.md); so all sleep until a message wakes them.
    """
    ranks = sum(info.machine_id == me.machine_id for info in cluster.ranks)
    return cores - ranks >= SPARE_CORES
