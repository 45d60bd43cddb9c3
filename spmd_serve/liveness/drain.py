"""The way from "please end" to the ranks of this host: first all API servers finish what runs."""

from typing import TYPE_CHECKING

from spmd_serve.liveness.followers import Followers
from spmd_serve.wire.lines import Message

if TYPE_CHECKING:
    from spmd_serve.liveness.watcher import Watcher

_ALL_DRAINED: Message = {"t": "all-drained"}


class Drain:
    """A part of the watcher. `reason`: who has asked for it; None: nobody."""

    def __init__(self, watcher: "Watcher") -> None:
        self.reason: str | None = None
        self.followers = Followers(self.go_on)
        self._watcher = watcher
        self._head_is_told = False
        self._all_have = False

    def request(self, reason: str) -> None:
        """Somebody wants the job to finish what it does and end: new requests are refused on all hosts."""
        watcher = self._watcher
        if self.reason is not None:
            return
        self.reason = reason
        message = {"t": "drain", "reason": reason}
        self.followers.drain(message, watcher.now)
        if watcher.uplink is not None:
            watcher.uplink.tell(message)
        if watcher.head is not None:
            watcher.head.broadcast(message)
        self.go_on()

    def go_on(self) -> None:
        """Once nothing runs anywhere any more, tell those ranks of this host that have a number.

        Before the ranks have met none has one: all are told then, as there is nothing to finish.
        """
        if self.reason is None or not self.followers.drained(self._watcher.now) or not self._all_drained():
            return
        for member in self._watcher.members.alive:
            has_place = member.hello.rank is not None or self._watcher.config is None
            if member.hello.kind == "rank" and has_place and not member.drains:
                member.drains = True
                member.tell({"t": "drain", "reason": self.reason})

    def all_drained(self) -> None:
        """The head says that nothing runs on any host any more."""
        self._all_have = True

    def _all_drained(self) -> bool:
        """Whether that is so; nothing runs on this one.

        Replicas of a mixture-of-experts model need each other for a step, whoever has a request. A watcher
        that lives comes here within its followers' time, and one that does not ends the job: no deadline.
        """
        head, uplink = self._watcher.head, self._watcher.uplink
        if self._all_have or self._watcher.config is None:
            return True
        if uplink is not None:
            if uplink.is_joined and not self._head_is_told:
                self._head_is_told = True
                uplink.tell({"t": "drained"})
            return not uplink.is_joined
        if head is not None:
            if not all(node.drained or node.left for node in head.nodes.values()):
                return False
            head.broadcast(_ALL_DRAINED)
        self._all_have = True
        return True

    def events(self) -> list[Message]:
        """What a newly connected host or follower must know of it."""
        if self.reason is None:
            return []
        return [{"t": "drain", "reason": self.reason}, *([_ALL_DRAINED] if self._all_have else [])]
