"""The event subscribers: API servers, which get the job's events and tell their clients."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spmd_serve.liveness.event_loop import Connection
from spmd_serve.wire.lines import Message, pack

_EXTRA_WAIT_S = 3.0
"""How much later than announced a subscriber may report that nothing is in flight, seconds."""


@dataclass
class Subscriber:
    """One connection. `drain_s`: how long it lets requests run after it was told to drain, seconds."""

    connection: Connection
    drain_s: float
    drained: bool = False


class Subscribers:
    """Subscribers are no members: the end of their connection is no failure."""

    def __init__(self) -> None:
        self.on_drained: Callable[[], None] = lambda: None
        """Called when `drained` may have become true."""
        self._all: list[Subscriber] = []
        self._draining_since: float | None = None

    def add(self, connection: Connection, drain_s: float, events: Iterable[Message]) -> Subscriber:
        """Add a subscriber, and send it a welcome and what has happened so far."""
        subscriber = Subscriber(connection, drain_s)
        self._all.append(subscriber)
        for message in ({"t": "welcome"}, *events):
            connection.send(pack(message))
        return subscriber

    def remove(self, subscriber: Subscriber) -> None:
        """Remove a subscriber whose connection is closed."""
        self._all.remove(subscriber)
        self.on_drained()

    def on_message(self, subscriber: Subscriber, message: Message) -> None:
        """Handle a subscriber's message: that nothing is in flight there any more."""
        if message["t"] == "drained":
            subscriber.drained = True
            self.on_drained()

    def send(self, message: Message) -> None:
        """Send a message to all subscribers."""
        for subscriber in self._all:
            subscriber.connection.send(pack(message))

    def drain(self, message: Message, now: float) -> None:
        """Tell all subscribers to drain; from now on `drained` tells whether they have."""
        self._draining_since = now
        self.send(message)

    def drained(self, now: float) -> bool:
        """Return whether nothing is in flight at any subscriber, or the announced time is over."""
        since = now if self._draining_since is None else self._draining_since
        return all(one.drained or now - since > one.drain_s + _EXTRA_WAIT_S for one in self._all)
