"""Who gets which rank, as a pure function of what everybody says."""

import random
from dataclasses import replace
from typing import Any

import pytest

from spmd_serve.errors import UsageError
from spmd_serve.rendezvous.rank_assignment import Arrival, arrange
from spmd_serve.system.network import Route


def node(number: int, changes: dict[str, Any] | None = None, ranks: int = 2) -> list[Arrival]:
    """The ranks of one torchrun agent on host<number>, at 10.0.0.<number>."""
    address = f"10.0.0.{number}"
    hellos = [
        Arrival(
            token=f"t{number}.{local}",
            torchrun_rank=number * ranks + local,
            local_rank=local,
            group_rank=number,
            names=(f"host{number}", f"host{number}.example.org"),
            addresses=(("127.0.0.1", "lo"), (address, "eth0")),
            route=Route(address, "eth0"),
            pid=1000 + number * ranks + local,
            machine_id=f"machine{number}",
            device="cpu",
            cpus="0-3",
            endpoint="elsewhere",
            endpoint_addresses=(),
            master_addresses=("10.0.0.0",),
        )
        for local in range(ranks)
    ]
    return [replace(hello, **(changes or {})) for hello in hellos]


def order(hellos: list[Arrival], head: str | None = None, addresses: tuple[str, ...] = ()) -> list[int]:
    """torchrun's ranks in our order; who is asked in which order does not matter."""
    shuffled = random.Random(1).sample(hellos, len(hellos))
    cluster = arrange(shuffled, head, addresses)
    assert arrange(hellos, head, addresses) == cluster
    assert [info.rank for info in cluster.ranks] == list(range(len(hellos)))
    return [info.torchrun_rank for info in cluster.ranks]


def test_the_node_that_owns_the_endpoint_comes_first() -> None:
    there = {"endpoint": "10.0.0.1", "endpoint_addresses": ("10.0.0.1",)}
    hellos = [*node(0, there), *node(1, there), *node(2, there)]
    assert order(hellos) == [2, 3, 0, 1, 4, 5]
    cluster = arrange(hellos, None)
    assert [info.node for info in cluster.ranks] == [0, 0, 1, 1, 2, 2]
    assert [info.hostname for info, *_ in cluster.nodes] == ["host1", "host0", "host2"]
    assert (cluster.ranks[1].address, cluster.ranks[1].interface) == ("10.0.0.1", "eth0")


def test_an_endpoint_name_that_is_loopback_on_its_own_host() -> None:
    mine = {"endpoint": "host1", "endpoint_addresses": ("127.0.1.1",)}
    others = {"endpoint": "host1", "endpoint_addresses": ("10.0.0.1",)}
    assert order([*node(0, others), *node(1, mine)]) == [2, 3, 0, 1]
    # Nobody sees its address, but it is that host's name.
    nowhere = {"endpoint": "host1.example.org", "endpoint_addresses": ()}
    assert order([*node(0, nowhere), *node(1, nowhere)]) == [2, 3, 0, 1]


def test_an_endpoint_outside_leaves_torchruns_order() -> None:
    etcd = {"endpoint": "etcd", "endpoint_addresses": ("10.0.9.9",)}
    assert order([*node(0, etcd), *node(1, etcd)]) == [0, 1, 2, 3]


def test_localhost_means_a_node_only_where_there_is_one_machine() -> None:
    local = {"endpoint": "localhost", "endpoint_addresses": ("127.0.0.1", "::1"), "machine_id": "same"}
    assert order([*node(0, local), *node(1, local)]) == [0, 1, 2, 3]


@pytest.mark.parametrize("head", ["host1", "HOST1", "host1.example.org", "10.0.0.1"])
def test_the_head_can_be_named(head: str) -> None:
    there = {"endpoint": "10.0.0.0", "endpoint_addresses": ("10.0.0.0",)}
    assert order([*node(0, there), *node(1, there)], head) == [2, 3, 0, 1]


def test_the_head_can_be_an_alias() -> None:
    assert order([*node(0), *node(1)], "service", ("10.0.0.1",)) == [2, 3, 0, 1]


def test_a_short_name_of_the_head() -> None:
    names = {"names": ("host1.example.org", "host1")}
    assert order([*node(0), *node(1, names)], "host1") == [2, 3, 0, 1]


def test_an_unknown_head_lists_the_hosts() -> None:
    with pytest.raises(UsageError) as caught:
        arrange([*node(0), *node(1)], "host7")
    assert str(caught.value) == "--head host7 is none of this run's hosts: host0 (10.0.0.0), host1 (10.0.0.1)"
    for head in ("localhost", "127.0.0.1"):
        with pytest.raises(UsageError, match="none of this run's hosts"):
            arrange([*node(0), *node(1)], head)


def test_an_ambiguous_head_is_refused() -> None:
    with pytest.raises(UsageError, match="means several of this run's hosts: name one by its address: gpu "):
        arrange([*node(0, {"names": ("gpu",)}), *node(1, {"names": ("gpu",)})], "gpu")


def test_two_agents_on_the_heads_machine() -> None:
    same = {"names": ("box",), "machine_id": "same"}
    assert order([*node(0), *node(1, same), *node(2, same)], "box") == [2, 3, 0, 1, 4, 5]


def loopback(route: Route | None = None) -> dict[str, Any]:
    return {"route": route or Route("127.0.1.1", "lo"), "master_addresses": ("127.0.1.1",)}


def test_the_masters_own_loopback_is_replaced_by_what_others_see() -> None:
    cluster = arrange([*node(0, loopback()), *node(1)], None)
    assert [(info.address, info.interface) for info, *_ in cluster.nodes] == [
        ("10.0.0.0", "eth0"),
        ("10.0.0.1", "eth0"),
    ]


def test_loopback_with_several_nodes_is_refused_with_the_cure() -> None:
    with pytest.raises(UsageError) as caught:
        arrange([*node(0, loopback()), *node(1, loopback())], None)
    assert "host0 would tell the other nodes to reach it at 127.0.1.1 (lo)" in str(caught.value)
    assert "--local-addr" in str(caught.value) and "--interface" in str(caught.value)


def test_a_chosen_loopback_interface_is_not_replaced() -> None:
    chosen = loopback(Route("127.0.0.1", "lo", chosen=True))
    with pytest.raises(UsageError, match="choose another --interface"):
        arrange([*node(0, chosen), *node(1)], None)


def test_loopback_is_right_where_all_agents_are_on_one_machine() -> None:
    one = loopback() | {"machine_id": "same"}
    cluster = arrange([*node(0, one), *node(1, one)], None)
    assert {info.address for info in cluster.ranks} == {"127.0.1.1"}
    assert len(cluster.nodes) == 2


def test_loopback_is_right_on_a_single_node() -> None:
    assert arrange(node(0, loopback()), None).ranks[0].address == "127.0.1.1"


def test_a_hello_travels_as_text() -> None:
    hello = node(1)[0]
    assert Arrival.from_json(hello.to_json()) == hello
