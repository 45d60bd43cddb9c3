"""The shape of a replica's control channel."""

from dataclasses import replace

import pytest

from spmd_serve.channel.plan import ChannelPlan, check_backend, driver_node, plan_channel
from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Layout
from tests.support.cluster import cluster


def test_one_host_needs_no_network() -> None:
    plan = plan_channel("auto", Layout(2, 2, 1), cluster(4), 0, home=0)
    assert plan == ChannelPlan(ring=(0, 1, 2, 3), members=(), behind={})


def test_two_hosts_ring_at_home_and_one_member_that_relays() -> None:
    plan = plan_channel("auto", Layout(2, 2, 1), cluster(2, 2), 0, home=0)
    assert plan == ChannelPlan(ring=(0, 1), members=(2,), behind={2: (2, 3)})
    assert plan.leader_of(3) == 2
    assert plan.leader_of(1) is None


def test_single_rank_hosts_are_members_themselves() -> None:
    plan = plan_channel("auto", Layout(1, 4, 1), cluster(1, 1, 1, 1), 0, home=0)
    assert plan == ChannelPlan(ring=(0,), members=(1, 2, 3), behind={})


def test_a_replica_that_is_not_on_its_drivers_host() -> None:
    plan = plan_channel("auto", Layout(2, 1, 2), cluster(2, 2), 1, home=0)
    assert plan == ChannelPlan(ring=(), members=(2,), behind={2: (2, 3)})


def test_two_replicas_on_one_host() -> None:
    assert plan_channel("auto", Layout(2, 1, 2), cluster(4), 1, home=0).ring == (2, 3)


def test_flat_gloo_and_nccl() -> None:
    layout, hosts = Layout(2, 1, 2), cluster(2, 2)
    assert plan_channel("gloo", layout, hosts, 1, home=0) == ChannelPlan((), (2, 3), {})
    assert plan_channel("nccl", layout, hosts, 1, home=1) == ChannelPlan((2,), (3,), {})


@pytest.mark.parametrize(("lb", "nodes"), [("internal", [0, 0]), ("hybrid", [0, 1]), ("external", [0, 1])])
def test_where_a_replicas_driver_lives(lb: str, nodes: list[int]) -> None:
    layout, hosts = Layout(2, 1, 2), cluster(2, 2)
    assert [driver_node(lb, layout, hosts, replica) for replica in range(2)] == nodes


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
def test_nccl_where_every_driver_has_its_first_rank_beside_it(
    lb: str, layout: Layout, nodes: tuple[int, ...]
) -> None:
    check_backend("nccl", lb, layout, on_gpus(*nodes))


def test_nccl_is_refused_where_a_driver_is_not_on_its_first_ranks_host() -> None:
    with pytest.raises(
        UsageError, match=r"--control-backend nccl .* replica 1 is driven on host0 .*--lb hybrid"
    ):
        check_backend("nccl", "internal", Layout(2, 1, 2), on_gpus(2, 2))
    check_backend("auto", "internal", Layout(2, 1, 2), on_gpus(2, 2))


def test_nccl_is_refused_on_cpus() -> None:
    with pytest.raises(UsageError, match=r"--control-backend nccl needs GPUs, but rank 0 on host0 .*gloo"):
        check_backend("nccl", "internal", Layout(2, 1, 1), cluster(2))
    check_backend("gloo", "internal", Layout(2, 1, 1), cluster(2))
