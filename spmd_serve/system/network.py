"""Addresses and interfaces of this host. Standard library only."""

import array
import fcntl
import ipaddress
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spmd_serve.errors import UsageError

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MAX_ADDRESSES = 1024
_LOOKUP_S = 2.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Route:
    """How this host is reached by the others of the run."""

    address: str
    interface: str
    """Empty where the system does not say which interface has the address."""
    chosen: bool = False
    """True: the user named the interface, so nothing may replace it."""


def choose_route(host: str, port: int, interface: str | None, environ: Mapping[str, str]) -> Route:
    """The interface that the flag names, else GLOO_SOCKET_IFNAME's, else the one on the way to `host`."""
    if interface:
        return interface_address(interface, "--interface")
    # gloo takes a list and makes a device of each; one is enough for us.
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    return interface_address(named, "GLOO_SOCKET_IFNAME") if named else route_to(host, port)


def route_to(host: str, port: int) -> Route:
    """Own address and interface on the way to host:port. Connects a UDP socket: nothing is sent.

    Towards an address of our own the kernel routes over lo, but the source address is still the one asked
    for, so the interface is looked up by that address. Where the name means 127.0.1.1 to its own host
    (Debian's /etc/hosts) the result is loopback: other nodes see a real address behind that name, and the
    rendezvous puts that one in its place (rendezvous/rank_assignment.py). UsageError when the name does not
    resolve here, or no route leads there.
    """
    reason = "no address"
    for family, address in _lookup(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port or 1))
            except OSError as error:
                reason = f"{address}: {error.strerror or error}"
                continue
            source = str(probe.getsockname()[0])
        return Route(source, own_addresses().get(source, ""))
    raise UsageError(
        f"no route from {socket.gethostname()} to {host}:{port} (MASTER_ADDR; {reason}): name the interface "
        "with --interface, or start torchrun with --local-addr=<an address that all nodes reach>"
    )


def interface_address(name: str, source: str = "--interface") -> Route:
    """Address of a named interface, IPv4 first; UsageError lists the interfaces that exist."""
    own = own_addresses()
    for address, interface in own.items():
        if interface == name:
            return Route(address, name, chosen=True)
    exist = ", ".join(f"{interface} ({address})" for address, interface in own.items())
    raise UsageError(
        f"{source} {name}: {socket.gethostname()} has no such interface with an address; it has "
        f"{exist or 'none'}"
    )


def own_addresses(if_inet6: Path = Path("/proc/net/if_inet6")) -> dict[str, str]:
    """All addresses of this host with their interfaces, IPv4 first, link-local left out."""
    found: dict[str, str] = {}
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    for start in range(0, used, _IFREQ_BYTES):
        entry = buffer[start : start + _IFREQ_BYTES].tobytes()
        # A second address of an interface may carry a label such as eth0:1.
        name = entry[:16].rstrip(b"\0").split(b"\0")[0].decode().partition(":")[0]
        found[socket.inet_ntoa(entry[20:24])] = name
    try:
        lines = if_inet6.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if scope != "20":
            found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return found


def own_names() -> list[str]:
    """Names of this host: as set, short, and fully qualified where a name server answers soon."""
    name = socket.gethostname()
    full = _soon(lambda: socket.getfqdn(name), name)
    return list(dict.fromkeys((name, name.partition(".")[0], full)))


def resolve(host: str) -> list[str]:
    """Addresses of a name as this host sees them; empty where it does not resolve (soon)."""

    def look() -> list[str]:
        try:
            return [address for _, address in _lookup(host)]
        except UsageError:
            return []

    return _soon(look, [])


def is_loopback(address: str) -> bool:
    """Whether an address means "this host" to everybody (127.*, ::1)."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def check_not_loopback(route: Route, nodes: int, host: str = "") -> None:
    """UsageError with the cure when other nodes would be told a loopback address.

    Several agents on one machine may use loopback: whether that is so is for the caller to know.
    """
    if nodes > 1 and is_loopback(route.address):
        host = host or socket.gethostname()
        raise UsageError(
            f"{host} would tell the other nodes to reach it at {route.address}"
            f"{f' ({route.interface})' if route.interface else ''}, which means themselves to them: "
            + (
                "choose another --interface (or GLOO_SOCKET_IFNAME)"
                if route.chosen
                else f"start torchrun on {host} with --local-addr=<its address>, or name an --interface"
            )
        )


def free_listener(address: str) -> socket.socket:
    """A listening socket on a port that the kernel chose."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=512)


def _lookup(host: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"{socket.gethostname()} can't resolve {host!r} (MASTER_ADDR; {error}): start torchrun on that "
            "node with --local-addr=<its address>, or give --rdzv-endpoint an address that all nodes resolve"
        ) from error
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _soon(call: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Answer of a name server, or `otherwise` after 2 s: a dead name server must not hold up a start."""
    answer: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), daemon=True).start()
    try:
        return answer.get(timeout=_LOOKUP_S)
    except queue.Empty:
        return otherwise


def free_port(address: str) -> int:
    """A port that nobody uses at one of this host's addresses now, for a server that can't take 0."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def host_name() -> str:
    """This machine's host name, as in every message."""
    return os.uname().nodename
