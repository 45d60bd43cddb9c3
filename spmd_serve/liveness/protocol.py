"""What is said between members, watchers and callers: the hello, the configuration, the verdict."""

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from spmd_serve.wire.lines import Message

KINDS = ("rank", "api", "engine", "coordinator")
"""Kinds of members, ancestors first: an earlier one explains a later one's death at the same moment."""

STACKS_SIGNAL = signal.SIGUSR2
"""Members let faulthandler answer it with the stacks of all threads, in C: that needs no GIL."""

_BEAT_S = 1.0


def beat_s(rank_timeout: float) -> float:
    """How often watchers tell their members and each other that they live, seconds."""
    return min(_BEAT_S, rank_timeout / 4)


@dataclass(frozen=True)
class Hello:
    """Who a member is. Its pid is not taken from here: the kernel tells it."""

    kind: str
    name: str
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a member's kind is one of {', '.join(KINDS)}, not {self.kind!r}")

    @classmethod
    def of(cls, hello: Mapping[str, Any]) -> "Hello":
        """From a mapping with kind, name and rank (an int or None); more keys, such as pid, are ignored."""
        rank = hello.get("rank")
        return cls(kind=str(hello["kind"]), name=str(hello["name"]), rank=None if rank is None else int(rank))


@dataclass(frozen=True)
class WatchConfig:
    """What a watcher learns after the rendezvous. Times are seconds.

    node: this host's number, head = 0.  hosts, ranks: name and global ranks of every node.
    head_address, head_port: where the head's watcher listens (what its `listen` returned).
    generation: this run's nonce.  key: shared secret that authenticates every line between watchers.
    rank_timeout: within this time a stop or a silence is known as a loss.
    step_timeout: a step, or a busy driver, without progress that counts as hung.
    join_timeout: how long the watchers of all hosts may take to find each other.
    grace_s: how long a member may take to end after the verdict, before SIGKILL.
    expect_turns: the driver sends heartbeats, so an idle rank's loop must turn within rank_timeout.
    """

    node: int
    hosts: tuple[str, ...]
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
        if len(self.hosts) != len(self.ranks) or not 0 <= self.node < len(self.hosts):
            raise ValueError(f"node {self.node} does not fit hosts {self.hosts} with ranks {self.ranks}")
        if min(self.rank_timeout, self.step_timeout, self.join_timeout) <= 0 or self.grace_s < 0:
            raise ValueError(
                "rank_timeout, step_timeout and join_timeout must be above 0 s, grace_s not below"
            )

    def to_json(self) -> Message:
        """A plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "WatchConfig":
        """Inverse of `to_json`."""
        values = {field.name: plain[field.name] for field in fields(cls) if field.name in plain}
        values["hosts"] = tuple(values["hosts"])
        values["ranks"] = tuple(tuple(ranks) for ranks in values["ranks"])
        return cls(**values)


@dataclass(frozen=True)
class End:
    """Part `part` of the job's `of` parts has ended normally.

    code: what all ranks are to end with; of several parts the highest counts.  early: it has never served, so
    that its driver sends its ranks no stop message, for which they would wait.
    """

    part: int = 0
    of: int = 1
    code: int = 0
    early: bool = False

    def to_json(self) -> Message:
        """A plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "End":
        """Inverse of `to_json`; more keys are ignored."""
        return cls(int(plain["part"]), int(plain["of"]), int(plain["code"]), bool(plain["early"]))


@dataclass(frozen=True)
class RootCause:
    """The first cause of this job's end.

    cause: one sentence that names who, where and what.  rank: global rank, None when it was no rank.
    detected_at: wall clock (Unix seconds).  detect_s: seconds from the death, or the last sign of life, to
    the verdict, where that is known.
    """

    cause: str
    rank: int | None
    host: str
    detected_at: float
    detect_s: float | None = None

    def to_json(self) -> Message:
        """A plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "RootCause":
        """Inverse of `to_json`."""
        rank, detect_s = plain["rank"], plain["detect_s"]
        return cls(
            cause=str(plain["cause"]),
            rank=None if rank is None else int(rank),
            host=str(plain["host"]),
            detected_at=float(plain["detected_at"]),
            detect_s=None if detect_s is None else float(detect_s),
        )
