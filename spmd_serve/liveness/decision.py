"""The root-cause decision: collects failure reports and declares one of them to be the root cause, once."""

import time
from collections.abc import Callable

from spmd_serve.liveness.protocol import RootCause
from spmd_serve.liveness.root_cause import HEAD_KEY, FailureReport, RootCauseArbiter, Weight
from spmd_serve.liveness.state import WatcherState
from spmd_serve.wire.lines import Message

_HEAD_DECIDES_S = 1.0
"""How much longer than the head's watcher another one waits before it decides by itself, seconds."""
_HANGS = (Weight.HUNG, Weight.IDLE_DRIVER, Weight.IDLE)


class RootCauseDecision:
    """Every part of the watcher reports failures here.

    `send_up(message)` passes a report to the head's watcher, if this is not the head; `head_decides()` tells
    whether that one can be reached. `on_hang` is called for reports of a hang, and `on_declared` once, with
    the root cause.
    """

    def __init__(self, state: WatcherState) -> None:
        self.root_cause: RootCause | None = None
        self.has_ended = False
        """Whether the job has ended normally: from then on nothing is a failure."""
        self.send_up: Callable[[Message], None] = lambda message: None
        self.head_decides: Callable[[], bool] = lambda: False
        self.on_hang: Callable[[], None] = lambda: None
        self.on_declared: Callable[[RootCause], None] = lambda root_cause: None
        self._state = state
        self._arbiter = RootCauseArbiter()

    @property
    def over(self) -> bool:
        """Whether nothing counts as a failure any more."""
        return self.root_cause is not None or self.has_ended

    @property
    def due(self) -> float | None:
        """When `decide` will declare a root cause, on the watcher's clock; None if nothing was reported."""
        return None if self.over else self._arbiter.due()

    @property
    def has_death(self) -> bool:
        """Whether a process or a node is known to be gone."""
        return self._arbiter.has_death

    @property
    def first(self) -> FailureReport | None:
        """The most causal report so far."""
        return self._arbiter.first()

    def report_failure(self, failure: FailureReport) -> None:
        """Record that a process or a node is gone or stuck, and pass the report to the head."""
        if self.over:
            return
        extra_s = _HEAD_DECIDES_S if failure.key != HEAD_KEY and self.head_decides() else 0.0
        if not self._arbiter.add(failure, self._state.now, extra_s):
            return
        self.send_up(_report(failure))
        if failure.weight in _HANGS:
            self.on_hang()

    def retract(self, key: str) -> None:
        """Remove a report: its subject has shown life."""
        if self._arbiter.retract(key):
            self.send_up({"t": "retract", "key": key})

    def reports(self) -> list[Message]:
        """Return all reports so far, as messages for the head."""
        return [_report(failure) for failure in self._arbiter.reports]

    def decide(self) -> None:
        """Declare the root cause if the time to wait for a more causal report is over."""
        if not self.over:
            failure = self._arbiter.root_cause(self._state.now)
            if failure is not None:
                self.declare_report(failure)

    def declare_report(self, failure: FailureReport) -> None:
        """Declare a report of this watcher to be the root cause."""
        waited = self._arbiter.waited(failure.key, self._state.now)
        detect_s = round((failure.age_s or 0.0) + waited, 3)
        self.declare(RootCause(failure.cause, failure.rank, failure.hostname, time.time(), detect_s))

    def declare(self, root_cause: RootCause) -> None:
        """Declare the root cause, once."""
        if not self.over:
            self.root_cause = root_cause
            self.on_declared(root_cause)


def _report(failure: FailureReport) -> Message:
    return {"t": "report_failure", "failure": failure.to_json()}
