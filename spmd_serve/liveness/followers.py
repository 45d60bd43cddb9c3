"""The watcher's side of those who only listen: API servers, which tell the job's news to their clients."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spmd_serve.liveness.event_loop import Conn
from spmd_serve.wire.lines import Message, pack

_REPORT_S = 3.0
"""How much later than promised a follower may say that nothing runs any more."""


@dataclass
class Follower:
    """One connection; `drain_s`: how long it lets requests run once it has been told to drain, seconds."""

    conn: Conn
    drain_s: float
    drained: bool = False


class Followers:
    """They are no members: nobody misses them, and their connections' ends are no news."""

    def __init__(self, on_drained: Callable[[], None]) -> None:
        """`on_drained` is called when `drained` may have become true."""
        self._all: list[Follower] = []
        self._on_drained = on_drained
        self._draining_since: float | None = None

    def add(self, conn: Conn, drain_s: float, events: Iterable[Message]) -> Follower:
        """Take one in, and tell it so, and what has happened so far."""
        follower = Follower(conn, drain_s)
        self._all.append(follower)
        for message in ({"t": "welcome"}, *events):
            conn.send(pack(message))
        return follower

    def hear(self, follower: Follower, message: Message) -> None:
        """What a follower says: that nothing runs there any more."""
        if message["t"] == "drained":
            follower.drained = True
            self._on_drained()

    def left(self, follower: Follower) -> None:
        """Its connection is closed."""
        self._all.remove(follower)
        self._on_drained()

    def tell(self, message: Message) -> None:
        """Tell all."""
        for follower in self._all:
            follower.conn.send(pack(message))

    def drain(self, message: Message, now: float) -> None:
        """Have all finish what they do; from now on `drained` says whether they have."""
        self._draining_since = now
        self.tell(message)

    def drained(self, now: float) -> bool:
        """Whether nothing runs at any of them any more, or has for longer than promised."""
        since = now if self._draining_since is None else self._draining_since
        return all(one.drained or now - since > one.drain_s + _REPORT_S for one in self._all)
