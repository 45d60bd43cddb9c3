"""Clusters of ranks, as the rendezvous would build them."""

from collections.abc import Sequence

from spmd_serve.topology import Cluster, RankInfo


def cluster(
    *ranks_per_node: int, machines: Sequence[str] | None = None, addresses: Sequence[str] | None = None
) -> Cluster:
    ranks: list[RankInfo] = []
    for node, count in enumerate(ranks_per_node):
        for local_rank in range(count):
            ranks.append(
                RankInfo(
                    rank=len(ranks),
                    local_rank=local_rank,
                    node=node,
                    hostname=f"host{node}",
                    address=addresses[node] if addresses else f"10.0.0.{node}",
                    interface="eth0",
                    pid=1000 + len(ranks),
                    torchrun_rank=len(ranks),
                    machine_id=machines[node] if machines else f"m{node}",
                    device="cpu",
                )
            )
    return Cluster(tuple(ranks))
