"""``-dp auto``: the number of replicas for a round's nodes, and the error if there is none."""

import pytest

from spmd_serve.commands.elastic import as_many_replicas, wait_for_nodes
from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Layout, RankInfo


def cluster(*ranks_per_node: int) -> Cluster:
    ranks: list[RankInfo] = []
    for node, count in enumerate(ranks_per_node):
        for local in range(count):
            here = (len(ranks), local, node, f"node{node}", "10.0.0.1", "eth0", 1, len(ranks), "m", "cpu")
            ranks.append(RankInfo(*here))
    return Cluster(tuple(ranks))


@pytest.mark.parametrize(
    ("nodes", "tp", "pp", "layout"),
    [
        ([1], None, None, (1, 1, 1)),
        ([2, 2], None, None, (2, 1, 2)),
        ([2, 2], 2, None, (2, 1, 2)),
        ([2, 2, 2], 2, None, (2, 1, 3)),
        ([2, 2], 1, None, (1, 1, 4)),
        ([2, 2], 2, 2, (2, 2, 1)),
        ([2] * 4, None, 2, (2, 2, 2)),
        ([1] * 4, 2, 2, (2, 2, 1)),
    ],
)
def test_as_many_replicas_as_the_ranks_make(
    nodes: list[int], tp: int | None, pp: int | None, layout: tuple[int, int, int]
) -> None:
    assert as_many_replicas(cluster(*nodes), tp, pp) == Layout(*layout)


@pytest.mark.parametrize(
    ("nodes", "tp", "pp", "message"),
    [
        (
            [1],
            2,
            None,
            "2 x --pipeline-parallel-size 1 = 2 ranks, but torchrun started 1 rank on 1 node:",
        ),
        (
            [2, 2, 2],
            2,
            2,
            "= 4 ranks, but torchrun started 6 ranks on 3 nodes: start nodes that make",
        ),
        ([2, 1], 1, None, "nodes run different numbers of ranks (2 on node0, 1 on node1)"),
        ([2], 0, None, "--tensor-parallel-size 0 is not possible"),
    ],
)
def test_ranks_that_make_no_replica_are_an_error_with_the_calculation(
    nodes: list[int], tp: int | None, pp: int | None, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        as_many_replicas(cluster(*nodes), tp, pp)
    assert message in str(refused.value)


def test_waits_for_nodes_only_if_torchrun_may_add_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_serve.rendezvous.store.FIRST_WORD_S", 0.0)
    logged: list[str] = []
    wait_for_nodes(cluster(1, 1), 2, 60.0, logged.append)
    assert logged == []
    wait_for_nodes(cluster(1, 1), 4, 0.05, logged.append)
    assert logged[0].startswith("waiting for more nodes (2 of at most 4 are here; they make no")
