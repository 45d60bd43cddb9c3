"""Elastic node counts: ``-dp auto`` makes as many replicas as the nodes of this round hold."""

import time

from spmd_serve.errors import UsageError
from spmd_serve.rendezvous.store import Say, Wait
from spmd_serve.topology import Cluster, Layout


def as_many_replicas(cluster: Cluster, tp: int | None, pp: int | None) -> Layout:
    """The layout with DP = world / (TP x PP); not given: TP = ranks per node, PP = 1.

    Raises UsageError where the world holds no whole number of replicas.
    """
    counts = cluster.ranks_per_node
    tp, pp = counts[0] if tp is None else tp, 1 if pp is None else pp
    world, size = sum(counts), max(tp * pp, 1)
    # Sizes below 1 and nodes that differ are said by the layout itself.
    if world % size and len(set(counts)) == 1:
        nodes = len(counts)
        raise UsageError(
            f"--data-parallel-size auto: a replica takes --tensor-parallel-size {tp} x "
            f"--pipeline-parallel-size {pp} = {size} ranks, but torchrun started {world} rank"
            f"{'s' * (world != 1)} on {nodes} node{'s' * (nodes != 1)}: start nodes that make a multiple of "
            f"{size} ranks, or change the sizes"
        )
    return Layout.resolve(counts, tp, pp, max(world // size, 1), hostnames=cluster.hostnames)


def wait_for_nodes(cluster: Cluster, most_nodes: int, timeout_s: float, say: Say) -> None:
    """Where torchrun may still add nodes: stay up to `timeout_s` seconds, though nothing can be served.

    When a node comes, torchrun ends this process (SIGTERM) and starts a new round with it.
    """
    nodes = len(cluster.nodes)
    wait = Wait(say, time.monotonic() + timeout_s)
    while nodes < most_nodes and wait.left > 0:
        wait.pause(
            lambda: f"more nodes ({nodes} of at most {most_nodes} are here; they make no whole replica)"
        )
