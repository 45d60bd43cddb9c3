"""Who is reached how: the shape of one replica's control channel, as a pure function of the layout."""

from dataclasses import dataclass

from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Layout


@dataclass(frozen=True)
class ChannelPlan:
    """The way of a replica's messages from its driver to its ranks (global rank numbers).

    `ring`: ranks that read the driver's own shared-memory ring (same host).
    `members`: ranks that receive the broadcast between hosts, as group members 1, 2, ...; member 0 is the
    driver, except for nccl, where it is the replica's first rank, which gets the driver's messages by ring.
    `behind`: leader rank to the ranks of its host that it feeds by a ring of its own, itself included.
    """

    ring: tuple[int, ...]
    members: tuple[int, ...]
    behind: dict[int, tuple[int, ...]]

    def leader_of(self, rank: int) -> int | None:
        """The rank whose ring feeds `rank`, or None when it is fed by the driver's ring or the group."""
        for leader, ranks in self.behind.items():
            if rank in ranks:
                return leader
        return None


def check_backend(backend: str, lb: str, layout: Layout, cluster: Cluster) -> None:
    """Raises UsageError where ``nccl`` cannot work: without GPUs, or with a driver far from its first rank.

    That rank has the driver's messages by a ring of their host.
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
                f"--control-backend nccl needs each replica's first rank on its driver's host, but with --lb "
                f"{lb} replica {replica} is driven on {cluster.hostnames[home]} and begins with "
                f"{cluster.ranks[first]}: leave it out (auto), or write --lb hybrid or --lb external"
            )


def driver_node(lb: str, layout: Layout, cluster: Cluster, replica: int) -> int:
    """The node where the replica's engine core runs: the head (internal), else that of its first rank."""
    return 0 if lb == "internal" else cluster.node_of(layout.first_rank(replica))


def plan_channel(
    backend: str, layout: Layout, cluster: Cluster, replica: int, home: int, own: int | None = None
) -> ChannelPlan:
    """Lay out the channel of `replica`, whose driver runs on node `home`.

    `own`: the rank in whose process the driver runs (scripts), which needs no channel.

    ``auto``: ring inside the driver's host, one group member per other host, which relays into its host's
    ring when it has more than one rank of the replica. ``gloo``: every rank is a member. ``nccl``: the first
    rank broadcasts to all others.
    """
    ranks = tuple(rank for rank in layout.replica_ranks(replica) if rank != own)
    if backend == "gloo":
        return ChannelPlan(ring=(), members=ranks, behind={})
    if backend == "nccl":
        return ChannelPlan(ring=ranks[:1], members=ranks[1:], behind={})
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(cluster.node_of(rank), []).append(rank)
    ring = tuple(hosts.pop(home, ()))
    members = tuple(group[0] for group in hosts.values())
    behind = {group[0]: tuple(group) for group in hosts.values() if len(group) > 1}
    return ChannelPlan(ring=ring, members=members, behind=behind)
