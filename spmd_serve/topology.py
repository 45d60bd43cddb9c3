"""The layout (TP x PP x DP) and the cluster: the coordinates and the node of every rank."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from spmd_serve.errors import UsageError

_FLAGS = {"tp": "--tensor-parallel-size", "pp": "--pipeline-parallel-size", "dp": "--data-parallel-size"}


class Coords(NamedTuple):
    """Coordinates of a rank: replica, pipeline stage, tensor-parallel rank."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a job. As in vLLM, rank = (dp * PP + pp) * TP + tp: TP varies fastest."""

    tp: int
    pp: int
    dp: int

    @property
    def replica_size(self) -> int:
        """Return the number of ranks of one replica."""
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self.replica_size * self.dp

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of a global rank."""
        return Coords(self.replica(rank), rank // self.tp % self.pp, rank % self.tp)

    def replica(self, rank: int) -> int:
        """Return the replica that a global rank belongs to."""
        return rank // self.replica_size

    def replica_ranks(self, replica: int) -> range:
        """Return the global ranks of a replica."""
        return range(self.first_rank(replica), self.first_rank(replica + 1))

    def first_rank(self, replica: int) -> int:
        """Return the first global rank of a replica."""
        return replica * self.replica_size

    def output_rank(self, replica: int) -> int:
        """Return the output rank of a replica: the first TP rank of the last pipeline stage."""
        return self.first_rank(replica + 1) - self.tp

    def expert_ranks(self, rank: int) -> list[int]:
        """Return the global ranks that share the experts of this rank's stage across all replicas."""
        stage = self.coords(rank).pp
        return [
            self.first_rank(replica) + stage * self.tp + part
            for replica in range(self.dp)
            for part in range(self.tp)
        ]

    @classmethod
    def resolve(
        cls,
        ranks_per_node: Sequence[int],
        tp: int | None,
        pp: int | None,
        dp: int | None,
        *,
        fill_dp: bool = False,
        hostnames: Sequence[str] = (),
    ) -> "Layout":
        """Return the layout for the ranks that torchrun started (`ranks_per_node`, head first).

        None stands for a size that is not given.

        With n nodes of k ranks, world = n * k:

        | given   | the others                                                                           |
        |---------|--------------------------------------------------------------------------------------|
        | nothing | TP = k, PP = n, DP = 1                                                               |
        | DP      | PP = nodes of a replica (n / DP; 1 if replicas share a node), TP = the remainder     |
        | PP      | TP = world / PP, DP = 1                                                              |
        | TP      | PP = n, DP = 1                                                                       |
        | TP, DP  | PP = the remainder                                                                   |
        | PP, DP  | TP = the remainder                                                                   |
        | TP, PP  | DP = 1                                                                               |

        With `fill_dp`, a missing DP becomes world / (TP * PP), and a missing TP becomes k if k * PP divides
        the world. `hostnames`, one per node, are used in messages only.

        Raises:
            UsageError: The product of the sizes is not the world size (the message shows the arithmetic and
                suggests sizes that fit), nodes run different numbers of ranks, or a replica neither fills
                whole nodes nor fits into one.
        """
        nodes, world = len(ranks_per_node), sum(ranks_per_node)
        given = {name: size for name, size in (("tp", tp), ("pp", pp), ("dp", dp)) if size is not None}
        for name, size in given.items():
            if size < 1:
                raise UsageError(f"{_FLAGS[name]} {size} is not possible: it must be 1 or more")
        if len(set(ranks_per_node)) != 1:
            counts = ", ".join(
                f"{count} on {host}"
                for count, host in zip(ranks_per_node, _names(hostnames, nodes), strict=True)
            )
            raise UsageError(
                f"nodes run different numbers of ranks ({counts}): start torchrun with the same "
                "--nproc-per-node on every node"
            )
        replicas = dp or 1
        if tp is None and pp is None:
            pp = nodes // replicas if nodes % replicas == 0 else 1
        if pp is None:
            assert tp is not None
            pp = nodes if dp is None else world // (dp * tp)
        if tp is None:
            per_node = ranks_per_node[0]
            fill = fill_dp and dp is None and world % (per_node * pp) == 0
            tp = per_node if fill else world // (replicas * pp)
        if dp is None and fill_dp and tp * pp > 0 and world % (tp * pp) == 0:
            replicas = world // (tp * pp)
        layout = cls(max(tp, 1), max(pp, 1), replicas)
        if layout.world_size != world:
            raise UsageError(layout._arithmetic(ranks_per_node) + ": " + _remedy(world, given))
        layout._check_evenness(ranks_per_node[0], _names(hostnames, nodes))
        return layout

    def _check_evenness(self, per_node: int, hostnames: Sequence[str]) -> None:
        """Check that each replica fills whole nodes or a part of one; devices and endpoints depend on it."""
        size = self.replica_size
        if per_node % size == 0 or size % per_node == 0:
            return
        split = next(
            ranks
            for ranks in map(self.replica_ranks, range(self.dp))
            if ranks[0] // per_node != ranks[-1] // per_node
        )
        nodes = sorted({rank // per_node for rank in split})
        raise UsageError(
            f"a replica of {size} ranks (TP {self.tp} x PP {self.pp}) does not fit nodes of {per_node} ranks "
            f"evenly: replica {split[0] // size} would have {spans('rank', split)} on "
            f"{' and '.join(hostnames[node] for node in nodes)}; start "
            f"a multiple or a divisor of {size} ranks on each node (--nproc-per-node), or change the sizes"
        )

    def _arithmetic(self, ranks_per_node: Sequence[int]) -> str:
        product = " x ".join(f"{flag} {getattr(self, name)}" for name, flag in _FLAGS.items())
        world, nodes = sum(ranks_per_node), len(ranks_per_node)
        started = f"{world} rank{'s' * (world != 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")
        return f"{product} = {self.world_size}, but torchrun started {started}"


def _remedy(world: int, given: dict[str, int]) -> str:
    product = 1
    for size in given.values():
        product *= size
    free = [name for name in _FLAGS if name not in given]
    if free and world % product == 0:
        rest = world // product
        return "give " + " or ".join(f"{_FLAGS[name]} {rest} (-{name} {rest})" for name in free)
    ranks = f"{product} ranks" if not free or product > world else f"a multiple of {product} ranks"
    return f"start {ranks} (--nnodes x --nproc-per-node), or change the sizes so that they make {world}"


def _names(hostnames: Sequence[str], nodes: int) -> Sequence[str]:
    return hostnames if len(hostnames) == nodes else [f"node {node}" for node in range(nodes)]


@dataclass(frozen=True)
class RankInfo:
    """One rank of the job, as known to all ranks."""

    rank: int
    local_rank: int
    node: int
    """Node number; the head is 0. A node is one torchrun agent with its ranks."""
    hostname: str
    address: str
    """Address at which other nodes reach this rank's machine."""
    interface: str
    pid: int
    torchrun_rank: int
    machine_id: str
    """Boot id of the kernel, equal for all agents and containers of one machine."""
    device: str
    cpus: str = ""
    """Logical CPUs that the process could use when it started, such as "0-3,8"."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.hostname}"


@dataclass(frozen=True)
class Cluster:
    """All ranks of the job, indexed by rank."""

    ranks: tuple[RankInfo, ...]

    @property
    def nodes(self) -> list[list[RankInfo]]:
        """Return the ranks of each node, the head first."""
        nodes: list[list[RankInfo]] = [[] for _ in range(self.ranks[-1].node + 1)]
        for info in self.ranks:
            nodes[info.node].append(info)
        return nodes

    @property
    def ranks_per_node(self) -> list[int]:
        """Return the number of ranks of each node."""
        return [len(node) for node in self.nodes]

    @property
    def hostnames(self) -> list[str]:
        """Return the hostname of each node."""
        return [node[0].hostname for node in self.nodes]

    def node_of(self, rank: int) -> int:
        """Return the node number of a rank."""
        return self.ranks[rank].node

    def to_json(self) -> str:
        """Return the JSON form, for the store."""
        return json.dumps([asdict(info) for info in self.ranks])

    @classmethod
    def from_json(cls, text: str) -> "Cluster":
        """Parse the result of `to_json`."""
        return cls(tuple(RankInfo(**item) for item in json.loads(text)))


def spans(noun: str, numbers: Iterable[int]) -> str:
    """Format numbers with their noun: "rank 2", "ranks 0-1, 5"."""
    members = set(numbers)
    return f"{noun}{'s' * (len(members) != 1)} {ranges(members)}"


def ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Format numbers as ranges: "0-1, 5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return separator.join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def by_hostname(noun: str, members: Collection[tuple[int, str]]) -> str:
    """Format (number, hostname) pairs: "ranks 0-1 on a, ranks 2-3 on b"."""
    groups: dict[str, list[int]] = {}
    for number, hostname in sorted(members):
        groups.setdefault(hostname, []).append(number)
    return ", ".join(f"{spans(noun, numbers)} on {hostname}" for hostname, numbers in groups.items())
