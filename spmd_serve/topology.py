"""Which rank does what, and where each rank lives. Pure: no network, no torch."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from spmd_serve.errors import UsageError

_FLAGS = {"tp": "--tensor-parallel-size", "pp": "--pipeline-parallel-size", "dp": "--data-parallel-size"}


class Coords(NamedTuple):
    """A rank's place: replica, pipeline stage, part of the tensors."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of a run. Rank = (dp * PP + pp) * TP + tp, as vLLM has it: TP fastest, then PP, then DP."""

    tp: int
    pp: int
    dp: int

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.replica_size * self.dp

    def coords(self, rank: int) -> Coords:
        """Place of a global rank."""
        return Coords(self.replica(rank), rank // self.tp % self.pp, rank % self.tp)

    def replica(self, rank: int) -> int:
        """Replica that a global rank belongs to."""
        return rank // self.replica_size

    def replica_ranks(self, replica: int) -> range:
        """Global ranks of a replica."""
        return range(self.first_rank(replica), self.first_rank(replica + 1))

    def first_rank(self, replica: int) -> int:
        """Global rank whose process hosts what a replica has only once."""
        return replica * self.replica_size

    def output_rank(self, replica: int) -> int:
        """Global rank that answers for a replica: the first TP rank of the last PP stage."""
        return self.first_rank(replica + 1) - self.tp

    def expert_ranks(self, rank: int) -> list[int]:
        """Global ranks over which the experts of this rank's stage are spread, where replicas are coupled."""
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
        hosts: Sequence[str] = (),
    ) -> "Layout":
        """Sizes for what torchrun started (`ranks_per_node`, head first); None stands for "not given".

        With n nodes of k ranks, world = n * k:

        | given   | the others                                                                          |
        |---------|-------------------------------------------------------------------------------------|
        | nothing | TP = k, PP = n, DP = 1                                                              |
        | DP      | PP = nodes of a replica (n / DP; 1 where replicas share a node), TP = what is left   |
        | PP      | TP = world / PP, DP = 1                                                             |
        | TP      | PP = n, DP = 1                                                                      |
        | TP, DP  | PP = what is left                                                                   |
        | PP, DP  | TP = what is left                                                                   |
        | TP, PP  | DP = 1                                                                              |

        With `fill_dp`, a DP that is not given is what TP * PP leave, and a TP that is not given is k where k
        * PP divides the world. The product must be the world: else UsageError, which does the sum and says
        what would fit. UsageError too for nodes with different numbers of ranks (`hosts`, one a node, names
        them), and for replicas that neither fill whole nodes nor share one.
        """
        nodes, world = len(ranks_per_node), sum(ranks_per_node)
        given = {name: size for name, size in (("tp", tp), ("pp", pp), ("dp", dp)) if size is not None}
        for name, size in given.items():
            if size < 1:
                raise UsageError(f"{_FLAGS[name]} {size} is not possible: it must be 1 or more")
        if len(set(ranks_per_node)) != 1:
            counts = ", ".join(
                f"{count} on {host}" for count, host in zip(ranks_per_node, _hosts(hosts, nodes), strict=True)
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
            raise UsageError(layout._sum(ranks_per_node) + ": " + _cure(world, given))
        layout._check_evenness(ranks_per_node[0], _hosts(hosts, nodes))
        return layout

    def _check_evenness(self, per_node: int, hosts: Sequence[str]) -> None:
        """Every replica fills whole nodes, or a part of one: devices and endpoints are counted by that."""
        size = self.replica_size
        if per_node % size == 0 or size % per_node == 0:
            return
        torn = next(
            ranks
            for ranks in map(self.replica_ranks, range(self.dp))
            if ranks[0] // per_node != ranks[-1] // per_node
        )
        raise UsageError(
            f"a replica of {size} ranks (TP {self.tp} x PP {self.pp}) does not fit nodes of {per_node} ranks "
            f"evenly: replica {torn[0] // size} would have {spans('rank', torn)} on "
            f"{' and '.join(hosts[node] for node in sorted({rank // per_node for rank in torn}))}; start "
            f"a multiple or a divisor of {size} ranks on each node (--nproc-per-node), or change the sizes"
        )

    def _sum(self, ranks_per_node: Sequence[int]) -> str:
        product = " x ".join(f"{flag} {getattr(self, name)}" for name, flag in _FLAGS.items())
        world, nodes = sum(ranks_per_node), len(ranks_per_node)
        started = f"{world} rank{'s' * (world != 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")
        return f"{product} = {self.world_size}, but torchrun started {started}"


def _cure(world: int, given: dict[str, int]) -> str:
    product = 1
    for size in given.values():
        product *= size
    free = [name for name in _FLAGS if name not in given]
    if free and world % product == 0:
        rest = world // product
        return "give " + " or ".join(f"{_FLAGS[name]} {rest} (-{name} {rest})" for name in free)
    ranks = f"{product} ranks" if not free or product > world else f"a multiple of {product} ranks"
    return f"start {ranks} (--nnodes x --nproc-per-node), or change the sizes so that they make {world}"


def _hosts(hosts: Sequence[str], nodes: int) -> Sequence[str]:
    return hosts if len(hosts) == nodes else [f"node {node}" for node in range(nodes)]


@dataclass(frozen=True)
class RankInfo:
    """One rank of the run, as all ranks know it."""

    rank: int
    local_rank: int
    node: int
    """Our node number: the head is 0. A node is a torchrun agent."""
    host: str
    address: str
    """The address by which other nodes reach this rank's host."""
    interface: str
    pid: int
    torchrun_rank: int
    machine_id: str
    """Boot id of the kernel: several agents (or containers) of one machine share it."""
    device: str
    cpus: str = ""
    """Logical CPUs that the process was allowed to use at its start, such as "0-3,8"."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class Cluster:
    """All ranks of the run; a rank is its index."""

    ranks: tuple[RankInfo, ...]

    @property
    def nodes(self) -> list[list[RankInfo]]:
        """Ranks by node, the head's first."""
        nodes: list[list[RankInfo]] = [[] for _ in range(self.ranks[-1].node + 1)]
        for info in self.ranks:
            nodes[info.node].append(info)
        return nodes

    @property
    def ranks_per_node(self) -> list[int]:
        """What Layout.resolve wants to know."""
        return [len(node) for node in self.nodes]

    @property
    def hosts(self) -> list[str]:
        """Host name of each node."""
        return [node[0].host for node in self.nodes]

    def node_of(self, rank: int) -> int:
        """Node number of a rank."""
        return self.ranks[rank].node

    def leaders(self) -> list[RankInfo]:
        """First rank of each node."""
        return [node[0] for node in self.nodes]

    def summary(self) -> list[str]:
        """One line per node for the log: host, address and interface, ranks."""
        return [
            f"node {number}: {node[0].host}, {node[0].address} ({node[0].interface or 'interface unknown'}), "
            f"{spans('rank', (info.rank for info in node))}"
            for number, node in enumerate(self.nodes)
        ]

    def to_json(self) -> str:
        """Text form, for the store."""
        return json.dumps([asdict(info) for info in self.ranks])

    @classmethod
    def from_json(cls, text: str) -> "Cluster":
        """The inverse of to_json."""
        return cls(tuple(RankInfo(**item) for item in json.loads(text)))


def spans(noun: str, numbers: Iterable[int]) -> str:
    """Numbers in short, with their noun: "rank 2", "ranks 0-1, 5"."""
    members = set(numbers)
    return f"{noun}{'s' * (len(members) != 1)} {ranges(members)}"


def ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Numbers in short: "0-1, 5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return separator.join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def by_host(noun: str, members: Collection[tuple[int, str]]) -> str:
    """(number, host) pairs in short: "ranks 0-1 on a, ranks 2-3 on b"."""
    hosts: dict[str, list[int]] = {}
    for number, host in sorted(members):
        hosts.setdefault(host, []).append(number)
    return ", ".join(f"{spans(noun, numbers)} on {host}" for host, numbers in hosts.items())
