"""Who opens which endpoint, on which port, for which replicas."""

from collections.abc import Sequence

import pytest

from spmd_serve.config.endpoints import Endpoint, check_spread, check_uds, endpoints, ports
from spmd_serve.errors import UsageError
from spmd_serve.topology import Layout
from tests.support.cluster import cluster


def shape(found: Sequence[Endpoint]) -> list[tuple[int, int, list[int], int]]:
    return [(one.number, one.rank, list(one.replicas), one.place) for one in found]


FOUR_BY_TWO = Layout(tp=2, pp=1, dp=4)


def test_internal_is_one_endpoint_of_rank_0() -> None:
    assert shape(endpoints("internal", FOUR_BY_TWO, cluster(4, 4))) == [(0, 0, [0, 1, 2, 3], 0)]


def test_hybrid_is_one_on_each_node_with_a_first_rank() -> None:
    assert shape(endpoints("hybrid", FOUR_BY_TWO, cluster(4, 4))) == [(0, 0, [0, 1], 0), (1, 4, [2, 3], 0)]


def test_hybrid_skips_nodes_without_a_first_rank() -> None:
    found = endpoints("hybrid", Layout(tp=2, pp=2, dp=2), cluster(2, 2, 2, 2))
    assert shape(found) == [(0, 0, [0], 0), (1, 4, [1], 0)]


def test_external_is_one_for_each_replica_with_places_counted_by_host() -> None:
    found = endpoints("external", FOUR_BY_TWO, cluster(4, 4))
    assert shape(found) == [(0, 0, [0], 0), (1, 2, [1], 1), (2, 4, [2], 0), (3, 6, [3], 1)]


def test_agents_of_one_machine_share_its_ports() -> None:
    one_host = cluster(2, 2, machines=["m", "m"], addresses=["127.0.0.1", "127.0.0.1"])
    found = endpoints("external", Layout(tp=2, pp=1, dp=2), one_host)
    assert [one.place for one in found] == [0, 1]
    assert ports([8000], found, one_host) == {0: 8000, 1: 8001}


def test_containers_of_one_machine_have_ports_of_their_own() -> None:
    containers = cluster(2, 2, machines=["m", "m"], addresses=["10.0.0.5", "10.0.0.6"])
    found = endpoints("hybrid", Layout(tp=2, pp=1, dp=2), containers)
    assert ports([8000], found, containers) == {0: 8000, 1: 8000}


def test_a_list_of_ports_is_for_the_endpoints_of_each_host() -> None:
    hosts = cluster(4, 4)
    found = endpoints("external", FOUR_BY_TWO, hosts)
    assert ports([8000, 9000], found, hosts) == {0: 8000, 1: 9000, 2: 8000, 3: 9000}


def test_port_0_stays_the_kernels_choice() -> None:
    hosts = cluster(4)
    assert ports([0], endpoints("external", Layout(2, 1, 2), hosts), hosts) == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [8000, 8001, 8002],
            "--port 8000,8001,8002 gives 3 ports, but the host with the most endpoints, host0",
        ),
        ([65535], "--port 65535 leaves no room for the 2 endpoints of host0"),
    ],
)
def test_ports_that_do_not_fit(given: list[int], said: str) -> None:
    hosts = cluster(4, 4)
    with pytest.raises(UsageError, match=said):
        ports(given, endpoints("external", FOUR_BY_TWO, hosts), hosts)


def test_hybrid_with_all_first_ranks_on_one_node_is_refused() -> None:
    with pytest.raises(UsageError, match=r"all of them \(ranks 0, 2\) are on host0: leave --lb out"):
        check_spread("hybrid", Layout(tp=2, pp=1, dp=2), cluster(4))
    for lb in ("internal", "external"):
        check_spread(lb, Layout(tp=2, pp=1, dp=2), cluster(4))
    check_spread("hybrid", Layout(tp=2, pp=2, dp=1), cluster(4))


def test_one_unix_socket_does_not_serve_two_endpoints_of_a_machine() -> None:
    layout = Layout(tp=2, pp=1, dp=2)
    apart, together = cluster(2, 2), cluster(4)
    check_uds("/run/s", endpoints("external", layout, apart), apart)
    check_uds(None, endpoints("external", layout, together), together)
    with pytest.raises(UsageError, match="--uds /run/s is one socket, but a machine holds 2 endpoints"):
        check_uds("/run/s", endpoints("external", layout, together), together)
