"""Addresses and interfaces of this machine, as it is."""

import socket
import threading
from pathlib import Path

import pytest

from spmd_serve.errors import UsageError
from spmd_serve.system import network
from spmd_serve.system.network import (
    Route,
    check_not_loopback,
    choose_route,
    free_listener,
    interface_address,
    is_loopback,
    own_addresses,
    own_names,
    resolve,
    route_to,
)

LOOPBACK = (Route("127.0.0.1", "lo"), Route("::1", "lo"))
"""What "localhost" may mean: which comes first is up to the machine."""


def test_own_addresses_have_interfaces() -> None:
    own = own_addresses()
    assert own["127.0.0.1"] == "lo"
    assert set(own.values()) <= {name for _, name in socket.if_nameindex()}


def test_version_6_addresses_are_read_without_link_local_ones(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 04 40 00 82     eth7\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth7\n"
    )
    own = own_addresses(table)
    assert own["fd00::2"] == "eth7" and own["::1"] == "lo"
    assert "fe80::fc:ff:fe00:1" not in own
    assert own_addresses(tmp_path / "absent")["127.0.0.1"] == "lo"


def test_the_route_to_an_own_address_is_its_interface_not_lo() -> None:
    for address, interface in own_addresses().items():
        assert route_to(address, 29400) == Route(address, interface)


def test_the_route_to_a_loopback_name_is_loopback() -> None:
    assert route_to("localhost", 0) in LOOPBACK
    assert route_to("127.0.1.1", 29400).interface == "lo"


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(UsageError) as caught:
        route_to("no-such-host.invalid", 29400)
    text = str(caught.value)
    assert "no-such-host.invalid" in text and socket.gethostname() in text
    assert "--local-addr" in text and "\n" not in text


def test_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unroutable(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unroutable)
    with pytest.raises(UsageError, match=r"192.0.2.1: Network is unreachable.*--interface"):
        route_to("192.0.2.1", 29400)


def test_an_interface_by_name() -> None:
    assert interface_address("lo") == Route("127.0.0.1", "lo", chosen=True)


def test_an_unknown_interface_lists_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"^--interface nope0: .* has lo \(127.0.0.1\)"):
        interface_address("nope0")


def test_the_flag_wins_over_the_variable_and_that_over_the_route() -> None:
    own = {interface: address for address, interface in reversed(own_addresses().items())}
    for name, address in own.items():
        assert choose_route("localhost", 1, name, {"GLOO_SOCKET_IFNAME": "nope0"}) == Route(
            address, name, True
        )
        assert choose_route("localhost", 1, None, {"GLOO_SOCKET_IFNAME": f"{name},lo"}).interface == name
    assert choose_route("localhost", 1, None, {}) in LOOPBACK
    with pytest.raises(UsageError, match=r"^GLOO_SOCKET_IFNAME nope0: "):
        choose_route("localhost", 1, None, {"GLOO_SOCKET_IFNAME": "nope0"})


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1")))
    assert not any(map(is_loopback, ("10.0.0.1", "fd00::2", "localhost")))


def test_loopback_is_refused_where_there_are_other_nodes() -> None:
    check_not_loopback(Route("127.0.0.1", "lo"), 1)
    check_not_loopback(Route("10.0.0.1", "eth0"), 2)
    with pytest.raises(UsageError, match=r"^gpu1 .* 127.0.1.1 \(lo\).*on gpu1 with --local-addr"):
        check_not_loopback(Route("127.0.1.1", "lo"), 2, "gpu1")


def test_listeners_have_ports_of_the_kernels_choice() -> None:
    with free_listener("127.0.0.1") as one, free_listener("127.0.0.1") as two:
        ports = {one.getsockname()[1], two.getsockname()[1]}
        assert len(ports) == 2 and 0 not in ports
        socket.create_connection(one.getsockname(), timeout=5).close()


def test_names_of_this_host() -> None:
    assert own_names()[0] == socket.gethostname()


def test_resolving() -> None:
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("no-such-host.invalid") == []
    assert resolve("a" * 300) == []


def test_a_dead_name_server_does_not_hold_up_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_LOOKUP_S", 0.1)
    never = threading.Event()
    assert network._soon(lambda: never.wait(30), None) is None
    never.set()
