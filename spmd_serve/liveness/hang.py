"""Is a member stopped, stuck in a step, idle or busy for too long? Pure; clocks are arguments."""

from dataclasses import dataclass
from typing import Literal

from spmd_serve.liveness.root_cause import Weight, patience_s

Trouble = Literal["stopped", "stuck", "idle", "stalled"]
_SETTLED_TURNS = 2
"""After loading a driver may pause once more (Python's collector) before it beats evenly."""
_LOOK_S = 0.5
_RANKS_FIRST_S = 5.0
"""A rank that hangs in a step explains a driver that makes no progress, so it is reported first."""
TROUBLES: tuple[Trouble, ...] = ("stopped", "stuck", "idle", "stalled")


@dataclass(frozen=True)
class Sighting:
    """One look at a member.

    stopped: the kernel says so (state T).  started, done: steps.  turned: its own time of the loop's last
    turn.
    state: what it says that it does.  works_since: its own time at which its loop, a driver's, last made
    progress with its work; 0.0: it has none.
    """

    stopped: bool
    started: int
    done: int
    turned: float
    state: str
    works_since: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Seconds after which, or (a stop) within which, each kind of trouble counts; see WatchConfig."""

    rank_timeout: float
    step_timeout: float
    expect_turns: bool

    @property
    def look_s(self) -> float:
        """How often members are looked at, seconds."""
        return min(_LOOK_S, self.rank_timeout / 4)


class Progress:
    """What a member has shown so far, on the observer's clock.

    Times the observer's own sightings, not the member's stamps: a torn read or an observer that was paused
    must not make somebody look old.
    """

    def __init__(self) -> None:
        self.last: Sighting | None = None
        self._stopped_since: float | None = None
        self._flight_since: float | None = None
        self._waits_since: float | None = None
        self._works_since: float | None = None
        self._turns = 0

    def see(self, sighting: Sighting, now: float) -> None:
        """Take in one look at time `now`."""
        last, self.last = self.last, sighting
        if not sighting.stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        in_flight = sighting.started > sighting.done
        if not in_flight:
            self._flight_since = None
        elif self._flight_since is None or last is None or last.done != sighting.done:
            self._flight_since = now
        if sighting.works_since == 0.0 or sighting.state != "ready":
            self._works_since = None
        elif self._works_since is None or last is None or last.works_since != sighting.works_since:
            self._works_since = now
        if sighting.state != "ready" or in_flight:
            # Starting, loading and stepping may take as long as they take.
            self._waits_since = None
        elif (
            self._waits_since is None
            or last is None
            or last.turned != sighting.turned
            or last.done != sighting.done
        ):
            self._turns += self._waits_since is not None
            self._waits_since = now

    def trouble(self, limits: Limits, now: float) -> tuple[Trouble, float] | None:
        """What is wrong at time `now`, and for how many seconds; the plainest trouble first."""
        stop_s = patience_s(limits.rank_timeout, Weight.OWN, limits.look_s)
        if self._stopped_since is not None and now - self._stopped_since >= stop_s:
            return "stopped", now - self._stopped_since
        if self._flight_since is not None and now - self._flight_since >= limits.step_timeout:
            return "stuck", now - self._flight_since
        patience = limits.rank_timeout if self._turns >= _SETTLED_TURNS else limits.step_timeout
        if limits.expect_turns and self._waits_since is not None and now - self._waits_since >= patience:
            return "idle", now - self._waits_since
        patience = limits.step_timeout + min(_RANKS_FIRST_S, limits.step_timeout)
        if self._works_since is not None and now - self._works_since >= patience:
            return "stalled", now - self._works_since
        return None
