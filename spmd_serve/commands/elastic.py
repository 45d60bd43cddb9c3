"""Elastic node counts: ``-dp auto`` sets as many replicas as the nodes of this round can hold."""

import time

from spmd_serve.errors import UsageError
from spmd_serve.rendezvous.store import Say, Wait
from spmd_serve.topology import Cluster, Layout


def as_many_replicas(cluster: Cluster, tp: int | None, pp: int | None) -> Layout:
    """Return the layout with DP = world size / (TP x PP). Defaults: TP = ranks per node, PP = 1.

    Raises UsageError if the ranks do not make a whole number of replicas.
    """
    counts = cluster.ranks_per_node
    tp, pp = counts[0] if tp is None else tp, 1 if pp is None else pp
    world, size = sum(counts), max(tp * pp, 1)
    # `Layout.resolve` reports sizes below 1, and nodes with different numbers of ranks.
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
    """Wait up to `timeout_s` seconds for more nodes if torchrun may still add some.

    When a node joins, torchrun ends this process with SIGTERM and starts a new round with that node.
    """
    nodes = len(cluster.nodes)
    wait = Wait(say, time.monotonic() + timeout_s)
    while nodes < most_nodes and wait.left > 0:
        wait.pause(
            lambda: f"more nodes ({nodes} of at most {most_nodes} are here; they make no whole replica)"
        )
