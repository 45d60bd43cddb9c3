"""Records that members and watchers exchange: hello, configuration, normal end, root cause."""

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from spmd_serve.wire.lines import Message

KINDS = ("rank", "api", "engine", "coordinator")
"""Kinds of members, parents first: of two deaths at one moment, that of the earlier kind is the cause."""

STACKS_SIGNAL = signal.SIGUSR2
"""faulthandler answers it in C with the stacks of all threads, so a held GIL does not matter."""

_BEAT_S = 1.0


def beat_s(rank_timeout: float) -> float:
    """Return the interval at which watchers send heartbeats to members and to each other, in seconds."""
    return min(_BEAT_S, rank_timeout / 4)


@dataclass(frozen=True)
class Hello:
    """A new member's description of itself. Its pid is not in here: the watcher gets that from the kernel."""

    kind: str
    name: str
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a member's kind is one of {', '.join(KINDS)}, not {self.kind!r}")

    @classmethod
    def of(cls, hello: Mapping[str, Any]) -> "Hello":
        """Make one from a mapping with kind, name and rank (int or None); other keys are ignored."""
        rank = hello.get("rank")
        return cls(kind=str(hello["kind"]), name=str(hello["name"]), rank=None if rank is None else int(rank))


@dataclass(frozen=True)
class WatchConfig:
    """The job's nodes and limits, which a watcher receives after the rendezvous. Times are seconds.

    Attributes:
        node: number of the watcher's node; the head is 0.
        hostnames, ranks: hostname and global ranks of every node.
        head_address, head_port: address of the head's watcher; the port is the result of its `listen`.
        round_id: id of this round.
        key: shared secret that authenticates every line between watchers.
        rank_timeout: a stopped or silent process, or a silent node, counts as lost within this time.
        step_timeout: a step or a busy driver without progress for this long counts as hung.
        join_timeout: the watchers of all nodes must be connected within this time.
        grace_s: a member still running this long after the root cause was declared gets SIGKILL.
        expect_turns: the driver sends heartbeats, so an idle rank's loop must turn within rank_timeout.
    """

    node: int
    hostnames: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    head_address: str
    head_port: int
    round_id: str
    rank_timeout: float = 10.0
    step_timeout: float = 300.0
    join_timeout: float = 30.0
    grace_s: float = 2.0
    expect_turns: bool = False
    key: str | None = None

    def __post_init__(self) -> None:
        if len(self.hostnames) != len(self.ranks) or not 0 <= self.node < len(self.hostnames):
            raise ValueError(f"node {self.node} does not fit nodes {self.hostnames} with ranks {self.ranks}")
        if min(self.rank_timeout, self.step_timeout, self.join_timeout) <= 0 or self.grace_s < 0:
            raise ValueError(
                "rank_timeout, step_timeout and join_timeout must be above 0 s, and grace_s at least 0 s"
            )

    def to_json(self) -> Message:
        """Return a plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "WatchConfig":
        """Inverse of `to_json`; other keys are ignored."""
        values = {field.name: plain[field.name] for field in fields(cls) if field.name in plain}
        values["hostnames"] = tuple(values["hostnames"])
        values["ranks"] = tuple(tuple(ranks) for ranks in values["ranks"])
        return cls(**values)


@dataclass(frozen=True)
class End:
    """The normal end of part `part` of the job's `of` parts.

    Attributes:
        code: exit code for all ranks; of several parts the highest counts.
        unserved: this part has never served, so its driver sends no stop message, for which ranks would wait.
    """

    part: int = 0
    of: int = 1
    code: int = 0
    unserved: bool = False

    def to_json(self) -> Message:
        """Return a plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "End":
        """Inverse of `to_json`; other keys are ignored."""
        return cls(int(plain["part"]), int(plain["of"]), int(plain["code"]), bool(plain["unserved"]))


@dataclass(frozen=True)
class RootCause:
    """The root cause of the job's failure.

    Attributes:
        cause: one sentence that names the process or node and says how it failed.
        rank: the failed rank (global), or None if another process or a whole node failed.
        hostname: the machine on which it failed.
        detected_at: time of the decision, in Unix seconds.
        detect_s: seconds from the death, or from the last sign of life, to the decision; None if unknown.
    """

    cause: str
    rank: int | None
    hostname: str
    detected_at: float
    detect_s: float | None = None

    def to_json(self) -> Message:
        """Return a plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "RootCause":
        """Inverse of `to_json`; other keys are ignored."""
        rank, detect_s = plain["rank"], plain["detect_s"]
        return cls(
            cause=str(plain["cause"]),
            rank=None if rank is None else int(rank),
            hostname=str(plain["hostname"]),
            detected_at=float(plain["detected_at"]),
            detect_s=None if detect_s is None else float(detect_s),
        )
