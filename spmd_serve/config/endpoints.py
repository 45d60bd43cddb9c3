"""Which rank opens which HTTP endpoint, on which port, with which replicas behind it. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Layout, RankInfo, spans

KINDS = ("internal", "hybrid", "external")

_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class Endpoint:
    """One API server and the replicas that it spreads its requests over.

    `number`: its place among all endpoints of the job. `rank`: whose child it is: the first rank of its
    first replica. `place`: its place among the endpoints of its host, which decides its port.
    """

    number: int
    rank: int
    replicas: range
    place: int


def endpoints(lb: str, layout: Layout, cluster: Cluster) -> tuple[Endpoint, ...]:
    """The endpoints of a job, by first replica.

    ``internal``: one for all replicas; ``hybrid``: one on every node that holds a replica's first rank, for
    the replicas that begin there; ``external``: one per replica.
    """
    groups: dict[int, list[int]] = {}
    for replica in range(layout.dp):
        node = cluster.node_of(layout.first_rank(replica))
        group = {"internal": 0, "hybrid": node, "external": replica}[lb]
        groups.setdefault(group, []).append(replica)
    places: Counter[tuple[str, str]] = Counter()
    found = []
    for number, replicas in enumerate(groups.values()):
        rank = layout.first_rank(replicas[0])
        host = host_of(cluster.ranks[rank])
        found.append(Endpoint(number, rank, range(replicas[0], replicas[-1] + 1), places[host]))
        places[host] += 1
    return tuple(found)


def host_of(info: RankInfo) -> tuple[str, str]:
    """Who shares one set of ports: agents of one machine do, containers on it with other addresses don't."""
    return info.machine_id, info.address


def check_spread(lb: str, layout: Layout, cluster: Cluster) -> None:
    """Raises UsageError for ``hybrid`` where it comes to one endpoint for several replicas."""
    if lb == "hybrid" and layout.dp > 1 and len(endpoints(lb, layout, cluster)) == 1:
        firsts = spans("rank", (layout.first_rank(replica) for replica in range(layout.dp)))
        raise UsageError(
            f"--lb hybrid opens an endpoint on each node that holds a replica's first rank, but all of them "
            f"({firsts}) are on {cluster.hostnames[0]}: leave --lb out (one endpoint for all replicas), or "
            "write --lb external (one for each)"
        )


def ports(given: Sequence[int], opened: Sequence[Endpoint], cluster: Cluster) -> dict[int, int]:
    """The port of each endpoint, by its number, for a ``--port`` of one or several numbers.

    One port is that of each host's first endpoint, and its further ones take the next ports (0: whichever are
    free). Several are the ports of each host's endpoints, in their order. Raises UsageError for too few, too
    many, or too high ones.
    """
    most = max(opened, key=lambda endpoint: endpoint.place)
    host, count = cluster.ranks[most.rank].hostname, most.place + 1
    if len(given) == 1:
        first = given[0]
        if first and first + most.place > _HIGHEST_PORT:
            raise UsageError(
                f"--port {first} leaves no room for the {count} endpoints of {host}, which take consecutive "
                f"ports: the highest port is {_HIGHEST_PORT}"
            )
        return {endpoint.number: first + endpoint.place if first else 0 for endpoint in opened}
    if len(given) != count:
        raise UsageError(
            f"--port {','.join(map(str, given))} gives {len(given)} ports, but the host with the most "
            f"endpoints, {host}, has {count}: give one port for each of a host's endpoints, or only the first"
        )
    return {endpoint.number: given[endpoint.place] for endpoint in opened}


def check_uds(path: str | None, opened: Sequence[Endpoint], cluster: Cluster) -> None:
    """Raises UsageError where a Unix socket would have to serve as two endpoints of one machine."""
    machines = Counter(cluster.ranks[endpoint.rank].machine_id for endpoint in opened)
    if path is not None and max(machines.values()) > 1:
        raise UsageError(
            f"--uds {path} is one socket, but a machine holds {max(machines.values())} endpoints: use --port"
        )
