"""The shape of a replica's control channel."""

from dataclasses import replace

import pytest

from spmd_serve.channel.plan import ChannelPlan, check_backend, driver_node, plan_channel
from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Layout
from tests.support.cluster import cluster


def test_one_node_needs_no_network() -> None:
    plan = plan_channel("auto", Layout(2, 2, 1), cluster(4), 0, home=0)
    assert plan == ChannelPlan(ring=(0, 1, 2, 3), members=(), behind={})


def test_two_nodes_use_a_ring_and_one_member_that_relays() -> None:
    plan = plan_channel("auto", Layout(2, 2, 1), cluster(2, 2), 0, home=0)
    assert plan == ChannelPlan(ring=(0, 1), members=(2,), behind={2: (2, 3)})
    assert plan.leader_of(3) == 2
    assert plan.leader_of(1) is None


def test_nodes_with_one_rank_have_no_relay() -> None:
    plan = plan_channel("auto", Layout(1, 4, 1), cluster(1, 1, 1, 1), 0, home=0)
    assert plan == ChannelPlan(ring=(0,), members=(1, 2, 3), behind={})


def test_replica_on_another_node_than_its_driver() -> None:
    plan = plan_channel("auto", Layout(2, 1, 2), cluster(2, 2), 1, home=0)
    assert plan == ChannelPlan(ring=(), members=(2,), behind={2: (2, 3)})


def test_two_replicas_on_one_node() -> None:
    assert plan_channel("auto", Layout(2, 1, 2), cluster(4), 1, home=0).ring == (2, 3)


def test_flat_gloo_and_nccl() -> None:
    layout, found = Layout(2, 1, 2), cluster(2, 2)
    assert plan_channel("gloo", layout, found, 1, home=0) == ChannelPlan((), (2, 3), {})
    assert plan_channel("nccl", layout, found, 1, home=1) == ChannelPlan((2,), (3,), {})


@pytest.mark.parametrize(("lb", "nodes"), [("internal", [0, 0]), ("hybrid", [0, 1]), ("external", [0, 1])])
def test_node_of_a_driver(lb: str, nodes: list[int]) -> None:
    layout, found = Layout(2, 1, 2), cluster(2, 2)
    assert [driver_node(lb, layout, found, replica) for replica in range(2)] == nodes


def on_gpus(*ranks_per_node: int) -> Cluster:
    ranks = cluster(*ranks_per_node).ranks
    return Cluster(tuple(replace(info, device=f"cuda:{info.local_rank}") for info in ranks))


@pytest.mark.parametrize(
    ("lb", "layout", "nodes"),
    [
        ("internal", Layout(2, 2, 1), (2, 2)),
        ("internal", Layout(2, 1, 2), (4,)),
        ("hybrid", Layout(2, 1, 2), (2, 2)),
        ("external", Layout(2, 1, 2), (2, 2)),
    ],
)
def test_nccl_accepts_drivers_on_the_node_of_their_first_rank(
    lb: str, layout: Layout, nodes: tuple[int, ...]
) -> None:
    check_backend("nccl", lb, layout, on_gpus(*nodes))


def test_nccl_rejects_a_driver_on_another_node_than_its_first_rank() -> None:
    with pytest.raises(
        UsageError, match=r"--control-backend nccl .* the driver of replica 1 is on host0, .*--lb hybrid"
    ):
        check_backend("nccl", "internal", Layout(2, 1, 2), on_gpus(2, 2))
    check_backend("auto", "internal", Layout(2, 1, 2), on_gpus(2, 2))


def test_nccl_rejects_cpus() -> None:
    with pytest.raises(UsageError, match=r"--control-backend nccl needs GPUs, but rank 0 on host0 .*gloo"):
        check_backend("nccl", "internal", Layout(2, 1, 1), cluster(2))
    check_backend("gloo", "internal", Layout(2, 1, 1), cluster(2))
