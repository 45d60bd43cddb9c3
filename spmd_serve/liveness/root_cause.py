"""Who was first: accusations are weighed for a moment, then one becomes the verdict. Pure, with no clock."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class Weight(IntEnum):
    """How causal an accusation is: a lower one explains a higher one that came up to a moment earlier."""

    OWN = 0
    """Killed by a signal, stopped, or said itself what went wrong."""
    UNEXPLAINED = 1
    """Ended without a word: an exit code, or not even that is known. Often a consequence of another's end."""
    HUNG = 2
    """A step makes no progress: all ranks of a collective then look alike."""
    HOST = 3
    """A whole host is silent, or its watcher is gone."""
    IDLE_DRIVER = 4
    """A driver that sends no heartbeats (all its ranks then idle too long as well), or whose loop hangs."""
    IDLE = 5
    """A rank whose loop does not turn."""
    PEER = 6
    """Somebody noticed only that somebody else is gone."""


def host_key(number: int) -> str:
    """What an accusation of a whole host is about."""
    return f"node {number}"


HEAD_KEY = host_key(0)
"""The head's; no higher court can be waited for then."""

SETTLE_S: Mapping[Weight, float] = {
    Weight.OWN: 0.3,
    Weight.UNEXPLAINED: 0.3,
    Weight.HUNG: 2.0,  # the stacks are written meanwhile
    Weight.HOST: 1.2,
    Weight.IDLE_DRIVER: 3.0,  # above heartbeat interval plus poll: a stopped driver is noticed by then
    Weight.IDLE: 3.0,
    Weight.PEER: 2.0,
}
"""How long an accusation waits for a more causal one, seconds."""

_SHORTEST_PATIENCE: Mapping[Weight, float] = {Weight.OWN: 1 / 2, Weight.HOST: 3 / 4}
"""Parts of the rank timeout: a stop is certain, but a host may be silent for a second without being lost."""


def patience_s(rank_timeout: float, weight: Weight, look_s: float) -> float:
    """How long a stop or a silence lasts when it is accused, so that the verdict comes within `rank_timeout`.

    All in seconds. Two looks (one to see it at all) and the time to settle are taken off, as far as a
    timeout of a few seconds has room for that.
    """
    return max(_SHORTEST_PATIENCE[weight] * rank_timeout, rank_timeout - SETTLE_S[weight] - 2 * look_s)


_FINAL = (Weight.OWN, Weight.UNEXPLAINED, Weight.HOST, Weight.PEER)


@dataclass(frozen=True)
class FailureReport:
    """Somebody is gone or stuck.

    key: what it is about; one key is heard once.  order: decides between accusations of one weight and
    moment.
    age_s: seconds since the last sign of life, where known.
    """

    key: str
    weight: Weight
    cause: str
    rank: int | None
    host: str
    order: int = 0
    age_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "FailureReport":
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        rank, age_s = plain["rank"], plain["age_s"]
        return cls(
            key=str(plain["key"]),
            weight=Weight(plain["weight"]),
            cause=str(plain["cause"]),
            rank=None if rank is None else int(rank),
            host=str(plain["host"]),
            order=int(plain["order"]),
            age_s=None if age_s is None else float(age_s),
        )


class RootCauseArbiter:
    """Hears accusations, and after the shortest settling time among them names the most causal one."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[FailureReport, float, float]] = {}

    def hear(self, failure: FailureReport, now: float, patience_s: float = 0.0) -> bool:
        """Take one in, at time `now`; False when its key was heard before.

        `patience_s` is added to its settling time: a higher court is to decide, this one only if that fails.
        """
        if failure.key in self._heard:
            return False
        self._heard[failure.key] = (failure, now, now + SETTLE_S[failure.weight] + patience_s)
        return True

    def retract(self, key: str) -> bool:
        """Forget one: the accused has shown life. False when there was none."""
        return self._heard.pop(key, None) is not None

    @property
    def heard(self) -> list[FailureReport]:
        """All accusations, in the order of their arrival."""
        return [failure for failure, _, _ in self._heard.values()]

    @property
    def has_death(self) -> bool:
        """Whether a member or a whole host is gone, or has said that it fails: no drain mends that.

        A stopped member, whose accusation has an age, may go on.
        """
        return any(
            one.weight in _FINAL and (one.weight is not Weight.OWN or one.age_s is None)
            for one, _, _ in self._heard.values()
        )

    def waited(self, key: str, now: float) -> float:
        """Seconds since an accusation was heard."""
        return now - self._heard[key][1]

    def due(self) -> float | None:
        """When `root_cause` will have an answer; None while nothing was heard."""
        return min((due for _, _, due in self._heard.values()), default=None)

    def root_cause(self, now: float) -> FailureReport | None:
        """The first cause, or None while more causal ones are still waited for."""
        due = self.due()
        return self.first() if due is not None and now >= due else None

    def first(self) -> FailureReport | None:
        """The most causal accusation of those heard so far."""
        best = min(self._heard.values(), key=lambda one: (one[0].weight, one[1], one[0].order), default=None)
        return None if best is None else best[0]


class PauseTolerantClock:
    """Time that this process itself has lived through, in seconds.

    An observer that was stopped, starved or paused together with its whole machine must not take that time
    for the
    silence of others: between two ticks at most `most` seconds count.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.now = 0.0
        self._last: float | None = None

    def tick(self, monotonic: float) -> float:
        """Call once per turn of the loop with time.monotonic(); returns the time lived so far."""
        if self._last is not None:
            self.now += min(max(monotonic - self._last, 0.0), self.most)
        self._last = monotonic
        return self.now
