"""The end protocol: from the request to drain to the normal end of all parts of the job."""

from collections.abc import Callable

from spmd_serve.liveness.decision import RootCauseDecision
from spmd_serve.liveness.members import Members
from spmd_serve.liveness.peers import Peers
from spmd_serve.liveness.protocol import End
from spmd_serve.liveness.state import WatcherState
from spmd_serve.liveness.subscribers import Subscribers
from spmd_serve.wire.lines import Message

_ALL_DRAINED: Message = {"t": "all-drained"}


class EndProtocol:
    """First all API servers finish what is in flight, then the ranks drain, then the parts of the job end."""

    def __init__(
        self,
        state: WatcherState,
        decision: RootCauseDecision,
        members: Members,
        subscribers: Subscribers,
        peers: Peers,
        on_ended: Callable[[], None],
    ) -> None:
        """`on_ended` is called once, when all parts have ended."""
        self.drain_reason: str | None = None
        """Why the job drains; None: it does not."""
        self._state = state
        self._decision = decision
        self._members = members
        self._subscribers = subscribers
        self._peers = peers
        self._on_ended = on_ended
        self._end = End()
        self._ends: list[End] = []
        self._at_end: list[Callable[[], None]] = []
        self._after_end: list[Callable[[], None]] = []
        self._head_knows = False
        self._everything_drained = False
        subscribers.on_drained = self.advance

    # Drain.

    def request_drain(self, reason: str) -> None:
        """Make the job finish what it does and end: all API servers stop admitting requests.

        torchrun asks for it too when one of its ranks has died. Then the job has failed, and its root cause
        will be declared soon: nothing drains.
        """
        if self._decision.has_death or self.drain_reason is not None:
            return
        self.drain_reason = reason
        message = {"t": "drain", "reason": reason}
        self._subscribers.drain(message, self._state.now)
        self._peers.send_up(message)
        self._peers.broadcast(message)
        self.advance()

    def advance(self) -> None:
        """When nothing is in flight on any node, tell those ranks of this node that have a number.

        Before the rendezvous, no rank has a number: all ranks get it then, as there is nothing to finish.
        """
        if self.drain_reason is None or not self._subscribers.drained(self._state.now):
            return
        if not self._all_nodes_drained():
            return
        for member in self._members.alive:
            has_number = member.hello.rank is not None or self._state.config is None
            if member.hello.kind == "rank" and has_number and not member.drains:
                member.drains = True
                member.send({"t": "drain", "reason": self.drain_reason})

    def on_all_drained(self) -> None:
        """Handle the head's message that nothing is in flight on any node."""
        self._everything_drained = True

    def _all_nodes_drained(self) -> bool:
        """Return whether nothing is in flight on any other node; nothing is in flight on this one.

        Replicas of a mixture-of-experts model need each other for every step. This wait needs no deadline: a
        living watcher comes here within its subscribers' time, and a dead one ends the job.
        """
        head, uplink = self._peers.head, self._peers.uplink
        if self._everything_drained or self._state.config is None:
            return True
        if uplink is not None:
            if uplink.is_joined and not self._head_knows:
                self._head_knows = True
                uplink.send({"t": "drained"})
            return not uplink.is_joined
        if head is not None and not head.all_drained:
            return False
        self._peers.broadcast(_ALL_DRAINED)
        self._everything_drained = True
        return True

    def drain_events(self) -> list[Message]:
        """Return what a newly connected node or subscriber must know of the drain."""
        if self.drain_reason is None:
            return []
        drain = {"t": "drain", "reason": self.drain_reason}
        return [drain, _ALL_DRAINED] if self._everything_drained else [drain]

    # The normal end.

    def end_part(self, end: End, then: Callable[[], None]) -> None:
        """Record that a part of the job has ended normally.

        `then` is called when all parts have ended, and all nodes know.
        """
        first = self._decision.first if self._decision.has_death else None
        if first is not None:
            # Ranks of other nodes must not end with code 0: their agents would take no part in a restart.
            self._decision.declare_report(first)
            return
        if self._peers.head_decides:
            # The head answers with the same message when all parts have ended.
            self._after_end.append(then)
            self._peers.send_up({"t": "end", **end.to_json()})
            return
        self._ends.append(end)
        self._at_end.append(then)
        parts = {one.part for one in self._ends}
        if len(parts) < end.of:
            return
        unserved = {one.part for one in self._ends if one.unserved} == parts
        self.finish(End(code=max(one.code for one in self._ends), unserved=unserved))
        waiting, self._at_end = self._at_end, []
        for then in waiting:
            if self._peers.head is not None:
                self._peers.head.end(self.end_event(), then)
            else:
                then()

    def finish(self, end: End) -> None:
        """From now on deaths are no failures; the ranks end as `end` says."""
        if not self._decision.over:
            self._decision.has_ended, self._end = True, end
            self._subscribers.send(self.end_event())
            self._members.send(self.end_event())
            self._on_ended()
        waiting, self._after_end = self._after_end, []
        for then in waiting:
            then()

    def end_event(self) -> Message:
        """Return the message that announces the end."""
        return {"t": "end", **self._end.to_json()}
