"""The layout of ranks as a formula and as a table."""

import pytest

from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Coords, Layout, RankInfo, by_hostname, spans

Sizes = tuple[int | None, int | None, int | None]


def test_tensor_parallel_runs_fastest_then_pipeline_then_data() -> None:
    layout = Layout(tp=2, pp=3, dp=2)
    assert layout.world_size == 12 and layout.replica_size == 6
    assert [layout.coords(rank) for rank in range(12)] == [
        Coords(dp, pp, tp) for dp in range(2) for pp in range(3) for tp in range(2)
    ]
    for rank in range(12):
        dp, pp, tp = layout.coords(rank)
        assert (dp * 3 + pp) * 2 + tp == rank
        assert layout.replica(rank) == dp
    assert [list(layout.replica_ranks(d)) for d in range(2)] == [list(range(6)), list(range(6, 12))]
    assert [layout.first_rank(d) for d in range(2)] == [0, 6]
    assert [layout.output_rank(d) for d in range(2)] == [4, 10]
    assert layout.coords(layout.output_rank(1)) == Coords(1, 2, 0)


@pytest.mark.parametrize(
    ("nodes", "given", "layout"),
    [
        # nothing given: tensor parallel inside a node, a stage per node
        ([1], (None, None, None), (1, 1, 1)),
        ([2], (None, None, None), (2, 1, 1)),
        ([8, 8], (None, None, None), (8, 2, 1)),
        # one given
        ([4], (4, None, None), (4, 1, 1)),
        ([2, 2], (2, None, None), (2, 2, 1)),
        ([4], (None, 2, None), (2, 2, 1)),
        ([2, 2], (None, 1, None), (4, 1, 1)),
        ([2, 2], (None, 4, None), (1, 4, 1)),
        ([4], (None, None, 2), (2, 1, 2)),
        ([2, 2], (None, None, 2), (2, 1, 2)),
        ([2, 2], (None, None, 4), (1, 1, 4)),
        ([2, 2], (None, None, 1), (2, 2, 1)),
        ([2, 2, 2, 2], (None, None, 2), (2, 2, 2)),
        # two given
        ([2, 2], (4, 1, None), (4, 1, 1)),
        ([2, 2], (2, None, 2), (2, 1, 2)),
        ([2, 2], (1, None, 2), (1, 2, 2)),
        ([4], (None, 2, 2), (1, 2, 2)),
        # all given
        ([2, 2], (1, 2, 2), (1, 2, 2)),
    ],
)
def test_sizes_follow_from_what_torchrun_started(
    nodes: list[int], given: Sizes, layout: tuple[int, int, int]
) -> None:
    assert Layout.resolve(nodes, *given) == Layout(*layout)


@pytest.mark.parametrize(
    ("nodes", "given", "layout"),
    [
        ([4], (2, 1, None), (2, 1, 2)),
        ([2, 2], (1, 1, None), (1, 1, 4)),
        ([2, 2], (1, None, None), (1, 2, 2)),
        ([2, 2], (None, 1, None), (2, 1, 2)),
        ([4], (None, 2, None), (2, 2, 1)),
        ([2, 2], (None, None, None), (2, 2, 1)),
        ([2, 2], (2, None, 2), (2, 1, 2)),
    ],
)
def test_data_parallel_fills_what_is_left_where_the_caller_wants_it(
    nodes: list[int], given: Sizes, layout: tuple[int, int, int]
) -> None:
    assert Layout.resolve(nodes, *given, fill_dp=True) == Layout(*layout)


@pytest.mark.parametrize(
    ("nodes", "given", "message"),
    [
        (
            [3],
            (2, 1, 1),
            "--tensor-parallel-size 2 x --pipeline-parallel-size 1 x --data-parallel-size 1 = 2, but "
            "torchrun started 3 ranks: start 2 ranks (--nnodes x --nproc-per-node), or change the sizes so "
            "that they make 3",
        ),
        (
            [4],
            (2, 1, None),
            "--tensor-parallel-size 2 x --pipeline-parallel-size 1 x --data-parallel-size 1 = 2, but "
            "torchrun started 4 ranks: give --data-parallel-size 2 (-dp 2)",
        ),
        (
            [2, 2],
            (1, None, None),
            "--tensor-parallel-size 1 x --pipeline-parallel-size 2 x --data-parallel-size 1 = 2, but "
            "torchrun started 4 ranks on 2 nodes: give --pipeline-parallel-size 4 (-pp 4) or "
            "--data-parallel-size 4 (-dp 4)",
        ),
        (
            [2, 2],
            (4, None, None),
            "--tensor-parallel-size 4 x --pipeline-parallel-size 2 x --data-parallel-size 1 = 8, but "
            "torchrun started 4 ranks on 2 nodes: give --pipeline-parallel-size 1 (-pp 1) or "
            "--data-parallel-size 1 (-dp 1)",
        ),
        (
            [1],
            (2, None, None),
            "= 2, but torchrun started 1 rank: start 2 ranks (--nnodes x --nproc-per-node)",
        ),
        ([3], (2, None, None), "= 2, but torchrun started 3 ranks: start a multiple of 2 ranks"),
        ([4], (None, 3, None), "= 3, but torchrun started 4 ranks: start a multiple of 3 ranks"),
        ([4], (None, None, 3), "= 3, but torchrun started 4 ranks: start a multiple of 3 ranks"),
        ([4], (3, None, 2), "= 6, but torchrun started 4 ranks: start 6 ranks"),
        ([2], (0, None, None), "--tensor-parallel-size 0 is not possible: it must be 1 or more"),
        ([2], (None, None, -1), "--data-parallel-size -1 is not possible"),
    ],
)
def test_sizes_that_do_not_fit_are_summed_up(nodes: list[int], given: Sizes, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Layout.resolve(nodes, *given)
    assert message in str(caught.value)


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"\(2 on a, 1 on b\): start torchrun with the same --nproc-per-node"
    ):
        Layout.resolve([2, 1], 1, None, None, hostnames=["a", "b"])
    with pytest.raises(UsageError, match=r"\(2 on node 0, 1 on node 1\)"):
        Layout.resolve([2, 1], None, None, None)


def test_experts_are_spread_over_the_same_stage_of_all_replicas() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    assert [layout.expert_ranks(rank) for rank in (0, 3, 5)] == [[0, 1, 4, 5], [2, 3, 6, 7], [0, 1, 4, 5]]


def test_replicas_that_lie_across_nodes_unevenly_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        Layout.resolve([3, 3], 2, None, 3, hostnames=["a", "b"])
    assert str(caught.value) == (
        "a replica of 2 ranks (TP 2 x PP 1) does not fit nodes of 3 ranks evenly: replica 1 would have "
        "ranks 2-3 on a and b; start a multiple or a divisor of 2 ranks on each node (--nproc-per-node), "
        "or change the sizes"
    )
    with pytest.raises(UsageError, match=r"a replica of 4 ranks .* nodes of 6 ranks evenly: replica 1"):
        Layout.resolve([6, 6], 2, 2, 3)
    assert Layout.resolve([6, 6], 3, None, 4) == Layout(3, 1, 4)
    assert Layout.resolve([3, 3], 3, 2, None) == Layout(3, 2, 1)


def info(rank: int, node: int, local_rank: int) -> RankInfo:
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        node=node,
        hostname=f"host{node}",
        address=f"10.0.0.{node}",
        interface="" if node else "eth0",
        pid=100 + rank,
        torchrun_rank=3 - rank,
        machine_id="m",
        device="cpu",
        cpus="0-3",
    )


CLUSTER = Cluster((info(0, 0, 0), info(1, 0, 1), info(2, 1, 0), info(3, 1, 1)))


def test_a_cluster_knows_its_nodes() -> None:
    assert [[member.rank for member in node] for node in CLUSTER.nodes] == [[0, 1], [2, 3]]
    assert CLUSTER.ranks_per_node == [2, 2]
    assert CLUSTER.hostnames == ["host0", "host1"]
    assert [CLUSTER.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert str(CLUSTER.ranks[3]) == "rank 3 on host1"


def test_a_cluster_travels_as_text() -> None:
    assert Cluster.from_json(CLUSTER.to_json()) == CLUSTER


def test_numbers_in_short() -> None:
    assert spans("rank", [2]) == "rank 2"
    assert spans("rank", [3, 0, 1, 7]) == "ranks 0-1, 3, 7"
    assert by_hostname("rank", [(2, "b"), (0, "a"), (1, "a")]) == "ranks 0-1 on a, rank 2 on b"
