"""Which failure was the first: reports are collected, then the most causal one is chosen. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class Weight(IntEnum):
    """How causal a report is: a lower value explains a higher one that came up to a moment earlier."""

    OWN = 0
    """Killed by a signal, stopped, or reported by the process itself."""
    UNEXPLAINED = 1
    """Ended with an exit code, or unknown how, and reported nothing. Often a consequence of another end."""
    HUNG = 2
    """A step makes no progress: all ranks of a collective then look alike."""
    NODE = 3
    """A whole node is silent, or its watcher is gone."""
    IDLE_DRIVER = 4
    """A driver sends no heartbeats (all its ranks are then idle for too long as well), or its loop hangs."""
    IDLE = 5
    """The loop of a rank does not turn."""
    PEER = 6
    """A process noticed only that another one is gone."""


def node_key(number: int) -> str:
    """Return the key of reports about a whole node."""
    return f"node {number}"


HEAD_KEY = node_key(0)
"""The key of reports about the head, which cannot decide on its own loss."""

SETTLE_S: Mapping[Weight, float] = {
    Weight.OWN: 0.3,
    Weight.UNEXPLAINED: 0.3,
    Weight.HUNG: 2.0,  # the stacks are written meanwhile
    Weight.NODE: 1.2,
    Weight.IDLE_DRIVER: 3.0,  # above heartbeat interval plus poll: a stopped driver is noticed by then
    Weight.IDLE: 3.0,
    Weight.PEER: 2.0,
}
"""How long a report waits for a more causal one, seconds."""

_SHORTEST_PATIENCE: Mapping[Weight, float] = {Weight.OWN: 1 / 2, Weight.NODE: 3 / 4}
"""Parts of the rank timeout: a stop is certain, but a node may be silent for a second without being lost."""


def patience_s(rank_timeout: float, weight: Weight, look_s: float) -> float:
    """Return after how many seconds a stop or a silence is reported.

    The root cause is then declared within `rank_timeout` seconds. Two looks (one to see it at all) and the
    settling time are subtracted, as far as a timeout of a few seconds leaves room for that.
    """
    return max(_SHORTEST_PATIENCE[weight] * rank_timeout, rank_timeout - SETTLE_S[weight] - 2 * look_s)


_FINAL = (Weight.OWN, Weight.UNEXPLAINED, Weight.NODE, Weight.PEER)


@dataclass(frozen=True)
class FailureReport:
    """A process or a node is gone or stuck.

    key: the subject; each key is recorded once.  order: decides between reports of the same weight and
    moment. age_s: seconds since the last activity, if known.
    """

    key: str
    weight: Weight
    cause: str
    rank: int | None
    hostname: str
    order: int = 0
    age_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "FailureReport":
        """Invert `to_json`. Raises KeyError, TypeError, ValueError or OverflowError for anything else."""
        rank, age_s = plain["rank"], plain["age_s"]
        return cls(
            key=str(plain["key"]),
            weight=Weight(plain["weight"]),
            cause=str(plain["cause"]),
            rank=None if rank is None else int(rank),
            hostname=str(plain["hostname"]),
            order=int(plain["order"]),
            age_s=None if age_s is None else float(age_s),
        )


class RootCauseArbiter:
    """Collects failure reports; chooses the most causal one after the shortest settling time among them."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[FailureReport, float, float]] = {}

    def add(self, failure: FailureReport, now: float, extra_s: float = 0.0) -> bool:
        """Record a report at time `now`; return False if its key is known.

        `extra_s` seconds are added to its settling time: the head's watcher decides, this one only if that
        fails.
        """
        if failure.key in self._reports:
            return False
        self._reports[failure.key] = (failure, now, now + SETTLE_S[failure.weight] + extra_s)
        return True

    def retract(self, key: str) -> bool:
        """Remove a report, because its subject has shown life; return False if there was none."""
        return self._reports.pop(key, None) is not None

    @property
    def reports(self) -> list[FailureReport]:
        """All reports, in the order of their arrival."""
        return [failure for failure, _, _ in self._reports.values()]

    @property
    def has_death(self) -> bool:
        """Whether a process or a whole node is gone, or has reported that it fails: no drain mends that.

        A stopped member, whose report has an age, may continue.
        """
        return any(
            one.weight in _FINAL and (one.weight is not Weight.OWN or one.age_s is None)
            for one in self.reports
        )

    def waited(self, key: str, now: float) -> float:
        """Return the seconds since a report was recorded."""
        return now - self._reports[key][1]

    def due(self) -> float | None:
        """Return when `root_cause` will have an answer; None while there is no report."""
        return min((due for _, _, due in self._reports.values()), default=None)

    def root_cause(self, now: float) -> FailureReport | None:
        """Return the root cause, or None while more causal reports may still come."""
        due = self.due()
        return self.first() if due is not None and now >= due else None

    def first(self) -> FailureReport | None:
        """Return the most causal report so far."""
        best = min(
            self._reports.values(), key=lambda one: (one[0].weight, one[1], one[0].order), default=None
        )
        return None if best is None else best[0]


class PauseTolerantClock:
    """The time that this process has run, in seconds, without the time during which it was stopped.

    An observer that was stopped, starved or paused together with its machine must not count that time as the
    silence of others: between two ticks at most `most` seconds count.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.now = 0.0
        self._last: float | None = None

    def tick(self, monotonic: float) -> float:
        """Call once per turn of the loop with time.monotonic(); return the time so far."""
        if self._last is not None:
            self.now += min(max(monotonic - self._last, 0.0), self.most)
        self._last = monotonic
        return self.now
