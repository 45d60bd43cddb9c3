"""The states of a job as one rank sees them, and the one function that changes them."""

import threading
from enum import Enum, auto


class JobState(Enum):
    """How far the job is, from the rendezvous to its end."""

    JOINING = auto()
    LOADING = auto()
    SERVING = auto()
    DRAINING = auto()
    ENDED = auto()
    FAILED = auto()


class JobEvent(Enum):
    """A fact about the job that can change its state."""

    JOINED = auto()
    """The rendezvous has given this rank its membership."""
    LOADED = auto()
    """This rank's work is set up: from now on the driver's stop message ends it, not the announced end."""
    DRAIN_REQUESTED = auto()
    """A signal on any node, or an endpoint that ended, asks the job to finish and end."""
    END_ANNOUNCED = auto()
    """The job's normal end is announced to all ranks."""
    FAILURE_DECLARED = auto()
    """The watcher has declared a root cause, or the connection to the watcher is lost."""


class ImpossibleTransition(Exception):
    """An event arrived in a state in which it cannot happen: a defect of this package."""


# A drain does not stop the set-up that is in progress, and events arrive from several threads: a rank may
# therefore join or load while the job drains, or after its end is announced.
_NEXT = {
    JobState.JOINING: {JobEvent.JOINED: JobState.LOADING},
    JobState.LOADING: {JobEvent.LOADED: JobState.SERVING},
    JobState.SERVING: {},
    JobState.DRAINING: dict.fromkeys((JobEvent.JOINED, JobEvent.LOADED), JobState.DRAINING),
    JobState.ENDED: dict.fromkeys(
        (JobEvent.JOINED, JobEvent.LOADED, JobEvent.DRAIN_REQUESTED), JobState.ENDED
    ),
    JobState.FAILED: dict.fromkeys(JobEvent, JobState.FAILED),
}
_FROM_ANY_STATE = {
    JobEvent.DRAIN_REQUESTED: JobState.DRAINING,
    JobEvent.END_ANNOUNCED: JobState.ENDED,
    JobEvent.FAILURE_DECLARED: JobState.FAILED,
}


def transition(state: JobState, event: JobEvent) -> JobState:
    """Return the state that follows `state` on `event`. Raises ImpossibleTransition if none does."""
    try:
        return (_FROM_ANY_STATE | _NEXT[state])[event]
    except KeyError:
        raise ImpossibleTransition(f"{event.name} in state {state.name}") from None


class JobLife:
    """The current state and the events so far. Thread-safe."""

    def __init__(self) -> None:
        self.state = JobState.JOINING
        self._lock = threading.Lock()
        self._events = {event: threading.Event() for event in JobEvent}

    def apply(self, event: JobEvent) -> JobState:
        """Change the state by `event` and return the new one. Raises ImpossibleTransition."""
        with self._lock:
            self.state = transition(self.state, event)
        self._events[event].set()
        return self.state

    def has_seen(self, event: JobEvent) -> bool:
        """Return whether `event` has happened, in any state."""
        return self._events[event].is_set()

    def wait_for(self, event: JobEvent, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for `event`; return whether it has happened."""
        return self._events[event].wait(timeout_s)
