"""Who of those that joined gets which rank: the head's node first. Pure: no network, no torch."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from spmd_serve.errors import UsageError
from spmd_serve.system.network import Route, check_not_loopback, is_loopback
from spmd_serve.topology import Cluster, RankInfo


@dataclass(frozen=True)
class Arrival:
    """What a process says of itself when it joins."""

    token: str
    """Random: tells this process from its predecessors in the same place."""
    torchrun_rank: int
    local_rank: int
    group_rank: int
    names: tuple[str, ...]
    """Names of its host, the plain host name first."""
    addresses: tuple[tuple[str, str], ...]
    """All (address, interface) pairs of its host."""
    route: Route
    pid: int
    machine_id: str
    device: str
    cpus: str
    endpoint: str
    """Host of the rendezvous endpoint, as given to this process's torchrun."""
    endpoint_addresses: tuple[str, ...]
    master_addresses: tuple[str, ...]
    """What MASTER_ADDR means on its host."""

    @property
    def hostname(self) -> str:
        """Plain host name."""
        return self.names[0]

    def to_json(self) -> str:
        """Text form, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Arrival":
        """The inverse of to_json."""
        item = json.loads(text)
        item["route"] = Route(**item["route"])
        item["addresses"] = tuple((address, interface) for address, interface in item["addresses"])
        for name in ("names", "endpoint_addresses", "master_addresses"):
            item[name] = tuple(item[name])
        return cls(**item)


def arrange(
    hellos: Sequence[Arrival],
    head: str | None,
    head_addresses: Collection[str] = (),
    as_torchrun: bool = False,
) -> Cluster:
    """Number the ranks: the head node's first, then the other nodes in torchrun's order, each by local rank.

    The head is the node that `head` names (host name, short or full, or an address; `head_addresses` is what
    it resolves to), else the one that owns the rendezvous endpoint's address, else that of torchrun's rank 0
    (as when the endpoint is an etcd elsewhere); with `as_torchrun` always that. UsageError for an unknown or
    ambiguous `head`, which lists the hosts, and for a node that other nodes would be told to reach by a
    loopback address.
    """
    nodes = _nodes(hellos)
    first = 0
    if not as_torchrun:
        first = _named_head(nodes, head, head_addresses) if head else _endpoint_node(nodes)
    order = [nodes[first], *(node for number, node in enumerate(nodes) if number != first)]
    routes = _routes(order)
    ranks: list[RankInfo] = []
    for number, node in enumerate(order):
        for hello, route in zip(node, routes[number], strict=True):
            ranks.append(
                RankInfo(
                    rank=len(ranks),
                    local_rank=hello.local_rank,
                    node=number,
                    hostname=hello.hostname,
                    address=route.address,
                    interface=route.interface,
                    pid=hello.pid,
                    torchrun_rank=hello.torchrun_rank,
                    machine_id=hello.machine_id,
                    device=hello.device,
                    cpus=hello.cpus,
                )
            )
    return Cluster(tuple(ranks))


def _nodes(hellos: Iterable[Arrival]) -> list[list[Arrival]]:
    groups: dict[int, list[Arrival]] = {}
    for hello in hellos:
        groups.setdefault(hello.group_rank, []).append(hello)
    return [sorted(groups[group], key=lambda hello: hello.local_rank) for group in sorted(groups)]


def _named_head(nodes: list[list[Arrival]], head: str, head_addresses: Collection[str]) -> int:
    wanted = head.lower()
    found = [
        number
        for number, (hello, *_) in enumerate(nodes)
        if wanted in {name.lower() for name in hello.names} or head in dict(hello.addresses)
    ] or _owners(nodes, head_addresses)
    if is_loopback(head) or wanted == "localhost":
        found = _owners_of_loopback(nodes)
    hosts = ", ".join(dict.fromkeys(f"{node[0].hostname} ({node[0].route.address})" for node in nodes))
    if not found:
        raise UsageError(f"--head {head} is none of this run's hosts: {hosts}")
    if len({nodes[number][0].machine_id for number in found}) > 1:
        raise UsageError(f"--head {head} means several of this run's hosts: name one by its address: {hosts}")
    return found[0]


def _endpoint_node(nodes: list[list[Arrival]]) -> int:
    # Each host resolves the endpoint by itself: to its own node it may be 127.0.1.1, to the others a real
    # address.
    everyone = [hello for node in nodes for hello in node]
    found = _owners(nodes, {address for hello in everyone for address in hello.endpoint_addresses})
    if not found:
        found = [number for number, (hello, *_) in enumerate(nodes) if hello.endpoint in hello.names]
    if not found and all(_means_itself(hello) for hello in everyone):
        found = _owners_of_loopback(nodes)
    return found[0] if found else 0


def _means_itself(hello: Arrival) -> bool:
    return bool(hello.endpoint_addresses) and all(map(is_loopback, hello.endpoint_addresses))


def _owners(nodes: list[list[Arrival]], addresses: Collection[str]) -> list[int]:
    real = {address for address in addresses if not is_loopback(address)}
    return [number for number, (hello, *_) in enumerate(nodes) if real & dict(hello.addresses).keys()]


def _owners_of_loopback(nodes: list[list[Arrival]]) -> list[int]:
    machines = {node[0].machine_id for node in nodes}
    return list(range(len(nodes))) if len(machines) == 1 else []


def _routes(nodes: list[list[Arrival]]) -> list[list[Route]]:
    everyone = [hello for node in nodes for hello in node]
    loopback = [is_loopback(hello.route.address) for hello in everyone]
    if all(loopback) and len({hello.machine_id for hello in everyone}) == 1:
        return [[hello.route for hello in node] for node in nodes]
    # What MASTER_ADDR means elsewhere is how the others reach the node that has that address.
    seen = {address for hello in everyone for address in hello.master_addresses if not is_loopback(address)}
    routes = [[_reachable(hello, seen) for hello in node] for node in nodes]
    for node, node_routes in zip(nodes, routes, strict=True):
        for route in node_routes:
            check_not_loopback(route, len(nodes), node[0].hostname)
    return routes


def _reachable(hello: Arrival, seen: Collection[str]) -> Route:
    if is_loopback(hello.route.address) and not hello.route.chosen:
        for address, interface in hello.addresses:
            if address in seen:
                return replace(hello.route, address=address, interface=interface)
    return hello.route
