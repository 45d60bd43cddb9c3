"""The way from "please end" to the ranks of this host: first the API servers finish what runs."""

from typing import TYPE_CHECKING

from spmd_serve.liveness.followers import Followers
from spmd_serve.liveness.records import Message

if TYPE_CHECKING:
    from spmd_serve.liveness.watcher import Watcher


class Drain:
    """A part of the watcher. `reason`: who has asked for it; None: nobody."""

    def __init__(self, watcher: "Watcher") -> None:
        self.reason: str | None = None
        self.followers = Followers(self.go_on)
        self._watcher = watcher

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
        """Once nothing runs here any more, tell the ranks of this host that have a number and do not know.

        Before the ranks have met none has one: all are told then, as there is nothing to finish.
        """
        if self.reason is None or not self.followers.drained(self._watcher.now):
            return
        for member in self._watcher.members.alive:
            has_place = member.hello.rank is not None or self._watcher.config is None
            if member.hello.kind == "rank" and has_place and not member.drains:
                member.drains = True
                member.tell({"t": "drain", "reason": self.reason})

    def news(self) -> list[Message]:
        """What a newly connected host or follower must know of it."""
        return [{"t": "drain", "reason": self.reason}] if self.reason is not None else []
