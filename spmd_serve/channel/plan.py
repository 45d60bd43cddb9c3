"""Plan how a driver reaches the ranks of its replica, as a pure function of the layout."""

from dataclasses import dataclass

from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Layout


@dataclass(frozen=True)
class ChannelPlan:
    """The paths of a replica's control messages from its driver to its ranks (global rank numbers)."""

    ring: tuple[int, ...]
    """Ranks on the driver's node, which read the driver's shared-memory ring."""
    members: tuple[int, ...]
    """Ranks that receive the broadcast between nodes, as group members 1, 2, ... Member 0 is the driver; with
    nccl it is the replica's first rank, which reads the driver's messages from the ring."""
    behind: dict[int, tuple[int, ...]]
    """For each rank that relays: the ranks of its node that read its ring, itself included."""

    def leader_of(self, rank: int) -> int | None:
        """Return the rank whose ring `rank` reads, or None for the driver's ring or the group."""
        for leader, ranks in self.behind.items():
            if rank in ranks:
                return leader
        return None


def check_backend(backend: str, lb: str, layout: Layout, cluster: Cluster) -> None:
    """Raise UsageError if ``nccl`` cannot work with this layout.

    It needs GPUs, and each driver on the node of its replica's first rank, which reads the driver's ring.
    """
    if backend != "nccl":
        return
    for info in cluster.ranks:
        if info.device == "cpu":
            raise UsageError(
                f"--control-backend nccl needs GPUs, but {info} computes on a CPU: leave it out (auto), or "
                "write --control-backend gloo"
            )
    for replica in range(layout.dp):
        first, home = layout.first_rank(replica), driver_node(lb, layout, cluster, replica)
        if cluster.node_of(first) != home:
            raise UsageError(
                f"--control-backend nccl needs each replica's first rank on its driver's node, but with --lb "
                f"{lb} the driver of replica {replica} is on {cluster.hostnames[home]}, and its first rank "
                f"is {cluster.ranks[first]}: leave it out (auto), or write --lb hybrid or --lb external"
            )


def driver_node(lb: str, layout: Layout, cluster: Cluster, replica: int) -> int:
    """Return the node of the replica's driver: the head with ``internal``, else that of its first rank."""
    return 0 if lb == "internal" else cluster.node_of(layout.first_rank(replica))


def plan_channel(
    backend: str, layout: Layout, cluster: Cluster, replica: int, home: int, own: int | None = None
) -> ChannelPlan:
    """Plan the channel of `replica`, whose driver runs on node `home`.

    `own` is the rank in whose process the driver runs (scripts); it needs no channel.

    ``auto`` uses a ring inside the driver's node and one group member per other node; the member relays into
    a ring of its node if that has several ranks of the replica. With ``gloo`` every rank is a member. With
    ``nccl`` the first rank broadcasts to all others.
    """
    ranks = tuple(rank for rank in layout.replica_ranks(replica) if rank != own)
    if backend == "gloo":
        return ChannelPlan(ring=(), members=ranks, behind={})
    if backend == "nccl":
        return ChannelPlan(ring=ranks[:1], members=ranks[1:], behind={})
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(cluster.node_of(rank), []).append(rank)
    ring = tuple(by_node.pop(home, ()))
    members = tuple(group[0] for group in by_node.values())
    behind = {group[0]: tuple(group) for group in by_node.values() if len(group) > 1}
    return ChannelPlan(ring=ring, members=members, behind=behind)
