"""The watcher: one small process per node that notices deaths, stops and hangs of its members."""

import os
import socket
import time

from spmd_serve.liveness import status
from spmd_serve.liveness.ancestors import Ancestors
from spmd_serve.liveness.decision import RootCauseDecision
from spmd_serve.liveness.ending import EndProtocol
from spmd_serve.liveness.event_loop import Loop, log
from spmd_serve.liveness.head import Head
from spmd_serve.liveness.members import Member, MemberCallbacks, Members
from spmd_serve.liveness.node import Uplink
from spmd_serve.liveness.peers import Peers
from spmd_serve.liveness.probe import Probe
from spmd_serve.liveness.protocol import End, RootCause, WatchConfig
from spmd_serve.liveness.root_cause import FailureReport
from spmd_serve.liveness.serving import Serving
from spmd_serve.liveness.state import WatcherState
from spmd_serve.liveness.subscribers import Subscribers
from spmd_serve.system.torchrun_env import job_folder
from spmd_serve.wire.lines import Message

_ALONE_S = 1.0
"""How long the watcher stays without members, to learn or to find the root cause of their deaths, seconds."""
_STACKS_INTERVAL_S = 10.0
_END_S = 10.0
"""How long members may stay after the job's normal end, seconds; ranks leave by themselves within 6 s."""


class Watcher:
    """Runs in its own process. It connects the parts and passes messages between them."""

    def __init__(
        self,
        listener: socket.socket,
        parent: tuple[int, int],
        agent: tuple[int, int] | None,
        restarts: int,
        rank_timeout: float,
        grace_s: float,
    ) -> None:
        """`parent`, `agent`: pid and pidfd of the rank that started it, and of the torchrun agent."""
        self._restarts = restarts
        self._loop = Loop()
        self._state = WatcherState(rank_timeout, grace_s)
        self._peers = Peers()
        self._serving = Serving(job_folder(os.environ))
        self._probe: Probe | None = None
        self._decision = RootCauseDecision(self._state)
        self._decision.send_up = self._peers.send_up
        self._decision.head_decides = lambda: self._peers.head_decides
        self._decision.on_hang = self._ask_for_stacks
        self._decision.on_declared = self._on_declared
        self._subscribers = Subscribers()
        callbacks = MemberCallbacks(
            status=self._status,
            greeting=self._greeting,
            events=self._events,
            on_request=self._on_request,
            on_death=lambda: self._ancestors.check_agent(),
        )
        self._members = Members(
            self._state, self._decision, self._subscribers, self._loop, listener, callbacks
        )
        self._ending = EndProtocol(
            self._state, self._decision, self._members, self._subscribers, self._peers, self._on_ended
        )
        self._ancestors = Ancestors(self._state, self._decision, self._members, self._loop, parent, agent)
        self._kill_at: float | None = None
        self._alone_since: float | None = None
        self._stacks_at = float("-inf")
        self._next_poll = self._next_beat = self._state.now
        self._probe_status: Message | None = None

    @property
    def round_id(self) -> str | None:
        """The id of this round; None before the rendezvous."""
        config = self._state.config
        return None if config is None else config.round_id

    def run(self) -> None:
        """Run until no member of this node is left and everything has been reported."""
        state = self._state
        while True:
            calls = self._loop.wait(self._sleep_s())
            state.clock.tick(time.monotonic())
            self._probe_status = None
            for call in calls:
                call()
            if state.now >= self._next_poll:
                self._next_poll = state.now + state.limits.look_s
                self._members.poll()
            if state.now >= self._next_beat:
                self._next_beat = state.now + state.beat_s
                self._members.beat()
                if self._probe is not None:
                    self._probe.tick()
                self._peers.tick(self._members.table())
            self._decision.decide()
            if self._kill_at is not None and state.now >= self._kill_at:
                self._kill_at = None
                self._members.kill()
            self._ending.advance()
            if self._may_leave():
                return

    def _sleep_s(self) -> float:
        times = [self._next_poll, self._next_beat, self._kill_at, self._decision.due]
        return max(0.0, min(at for at in times if at is not None) - self._state.now)

    # What the parts report.

    def _ask_for_stacks(self) -> None:
        """Ask for the stacks of all processes: on all nodes if this is the head, else on this node."""
        if self._state.now - self._stacks_at < _STACKS_INTERVAL_S:
            return
        self._stacks_at = self._state.now
        self._members.ask_for_stacks()
        self._peers.broadcast({"t": "stacks"})

    def _on_declared(self, root_cause: RootCause) -> None:
        self._kill_at = self._state.now + self._state.grace_s
        for event in self._events():
            self._subscribers.send(event)
            self._members.send(event)
            self._peers.broadcast(event)
        # Afterwards: the disk may be slow.
        self._serving.record_failure(root_cause)

    def _on_ended(self) -> None:
        self._kill_at = self._state.now + _END_S

    def _on_request(self, member: Member, message: Message) -> None:
        """Handle a member's message that is not about itself."""
        kind, reply = message["t"], {"t": "reply", "id": message.get("id")}
        if kind == "listen":
            member.send(reply | self._listen(str(message["address"])))
        elif kind == "configure":
            member.send(reply | self._configure(WatchConfig.from_json(message["config"])))
        elif kind == "identify":
            self._ending.advance()
        elif kind == "drain":
            self._ending.request_drain(str(message["reason"]))
        elif kind == "end":
            self._ending.end_part(End.from_json(message), lambda: member.send(reply))
        elif kind == "serving":
            self._on_serving(message)
        elif kind == "probe":
            member.send(reply | self._open_probe(int(message["port"])))
        elif kind == "view":
            member.send(reply | {"view": self._status()})

    def _on_node_message(self, message: Message) -> None:
        """On the head: handle another node's message about the job."""
        kind = message["t"]
        if kind == "report_failure":
            self._decision.report_failure(FailureReport.from_json(message["failure"]))
        elif kind == "retract":
            self._decision.retract(str(message["key"]))
        elif kind == "serving":
            self._on_serving(message)
        elif kind == "drain":
            self._ending.request_drain(str(message["reason"]))
        elif kind == "end":
            self._ending.end_part(End.from_json(message), lambda: None)

    def _on_head_message(self, message: Message) -> None:
        """On another node: handle the head's message about the job."""
        kind = message["t"]
        if kind == "root_cause":
            self._decision.declare(RootCause.from_json(message["root_cause"]))
        elif kind == "stacks":
            self._ask_for_stacks()
        elif kind == "all-serve":
            self._serving.on_all(message)
        elif kind == "drain":
            self._ending.request_drain(str(message["reason"]))
        elif kind == "all-drained":
            self._ending.on_all_drained()
        elif kind in ("end", "bye"):
            self._peers.send_up({"t": "end-known"})
            self._ending.finish(End.from_json(message) if kind == "end" else End())

    def _on_head_joined(self) -> None:
        """Tell the head what has happened before it could be reached."""
        for message in (*self._decision.reports(), *self._ending.drain_events()):
            self._peers.send_up(message)

    def _on_serving(self, message: Message) -> None:
        """Record that an endpoint admits requests."""
        if self._peers.uplink is not None:
            self._peers.send_up(message)
        elif self._serving.on_endpoint(message):
            self._peers.broadcast(self._serving.event())

    # Configuration.

    def _listen(self, address: str) -> Message:
        try:
            self._peers.head = self._peers.head or Head(
                self._state, self._decision, self._loop, address, self._events, self._on_node_message
            )
        except OSError as problem:
            return {"error": f"the watcher cannot listen at {address}: {problem.strerror}"}
        return {"port": self._peers.head.port}

    def _open_probe(self, port: int) -> Message:
        try:
            self._probe = self._probe or Probe(
                self._loop, port, lambda: self._state.now, self._status_for_probes, self._members.troubles
            )
        except OSError as problem:
            return {"error": problem.strerror or str(problem)}
        return {"port": self._probe.port}

    def _configure(self, config: WatchConfig) -> Message:
        state, peers = self._state, self._peers
        if state.config is not None:
            return (
                {} if state.config == config else {"error": "the watcher has another configuration already"}
            )
        if config.node == 0 and len(config.hostnames) > 1 and peers.head is None:
            return {"error": "the head's watcher does not listen yet: call listen() first"}
        state.configure(config)
        self._members.send(state.rules())
        if config.node != 0:
            # Before the rendezvous no node knows whether it is the head, so other nodes may have listened
            # too.
            if peers.head is not None:
                peers.head.close()
                peers.head = None
            peers.uplink = Uplink(
                state, self._decision, self._loop, config, self._on_head_joined, self._on_head_message
            )
        elif peers.head is not None:
            peers.head.accept()
        self._next_beat = state.now
        return {}

    # What others are told.

    def _greeting(self) -> list[Message]:
        """Return what has happened before a new member came."""
        if self._decision.root_cause is not None:
            self._kill_at = self._state.now + self._state.grace_s
        return self._outcome()

    def _events(self) -> list[Message]:
        """Return what a newly connected node or subscriber must know."""
        serving = [self._serving.event()] if self._serving.all else []
        return self._outcome() or self._ending.drain_events() or serving

    def _outcome(self) -> list[Message]:
        root_cause = self._decision.root_cause
        if root_cause is not None:
            return [{"t": "root_cause", "root_cause": root_cause.to_json()}]
        return [self._ending.end_event()] if self._decision.has_ended else []

    def _status(self) -> Message:
        """Return the status of the job as this watcher sees it."""
        state, decision, head = self._state, self._decision, self._peers.head
        tables: dict[int, tuple[list[Message], float]] = {state.node: (self._members.table(), 0.0)}
        if head is not None:
            tables |= {number: (node.table, state.now - node.heard) for number, node in head.nodes.items()}
        return status.build(
            self.round_id,
            state.node,
            state.hostnames,
            state.ranks,
            tables,
            restarts=self._restarts,
            serving=self._serving.all,
            history=self._serving.history,
            draining=self._ending.drain_reason,
            ended=decision.has_ended,
            root_cause=decision.root_cause.to_json() if decision.root_cause is not None else None,
        )

    def _status_for_probes(self) -> Message:
        """Return the status, built once per turn of the loop: anybody may connect to the probe port."""
        if self._probe_status is None:
            self._probe_status = self._status()
        return self._probe_status

    def _may_leave(self) -> bool:
        if self._members.alive or self._ancestors.parent_may_register:
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = self._state.now
        first = self._decision.first
        if first is not None and not self._decision.over:
            if self._state.now - self._alone_since < _ALONE_S:
                return False
            if self._peers.uplink is None:
                self._decision.declare_report(first)
        self._peers.send_up({"t": "bye"})
        self._peers.broadcast({"t": "bye"})
        if self._decision.root_cause is not None:
            # After everything that this node's members have printed.
            log(f"the job has failed: {self._decision.root_cause.cause}")
        return True
