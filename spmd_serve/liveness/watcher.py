"""The watcher: one small process per host that outlives its ranks by a moment, to say who was first."""

import os
import socket
import time
from collections.abc import Callable

from spmd_serve.liveness import status
from spmd_serve.liveness.ancestors import Ancestors
from spmd_serve.liveness.drain import Drain
from spmd_serve.liveness.event_loop import Loop, log
from spmd_serve.liveness.hang import Limits
from spmd_serve.liveness.head import Head
from spmd_serve.liveness.members import Member, Members
from spmd_serve.liveness.node import Uplink
from spmd_serve.liveness.probe import Probe
from spmd_serve.liveness.protocol import End, RootCause, WatchConfig, beat_s
from spmd_serve.liveness.root_cause import (
    HEAD_KEY,
    FailureReport,
    PauseTolerantClock,
    RootCauseArbiter,
    Weight,
)
from spmd_serve.liveness.serving import Serving
from spmd_serve.system.torchrun_env import job_folder
from spmd_serve.wire.lines import Message

_REPORT_S = 1.0
"""How long the watcher stays without members, to hear the verdict on their deaths or to find it."""
_HIGHER_COURT_S = 1.0
"""How much longer than the head's watcher another one waits before it judges by itself."""
_STACKS_AGAIN_S = 10.0
_END_S = 10.0  # how long members may stay after the job's normal end; ranks leave by themselves within 6 s


class Watcher:
    """Runs in its own process. All times are seconds of its own lived clock."""

    def __init__(
        self,
        listener: socket.socket,
        parent: tuple[int, int],
        agent: tuple[int, int] | None,
        restarts: int,
        rank_timeout: float,
        grace_s: float,
    ) -> None:
        """`parent`, `agent`: pid and pidfd of the rank that forked us, and of the torchrun agent."""
        self._clock = PauseTolerantClock(0.0)
        self.loop = Loop()
        self.host = socket.gethostname()
        self.config: WatchConfig | None = None
        self.restarts = restarts
        self.root_cause: RootCause | None = None
        self.has_ended = False
        self._end = End()
        self.drain = Drain(self)
        self.followers = self.drain.followers
        self.serving = Serving(job_folder(os.environ))
        self.probe: Probe | None = None
        self.head: Head | None = None
        self.uplink: Uplink | None = None
        self.members = Members(self, self.loop, listener)
        self._arbiter = RootCauseArbiter()
        self._grace_s = grace_s
        self._kill_at: float | None = None
        self._ends: list[End] = []
        self._at_end: list[Callable[[], None]] = []
        self._after_end: list[Callable[[], None]] = []
        self._alone_since: float | None = None
        self._stacks_at = float("-inf")
        self._set_limits(Limits(rank_timeout, float("inf"), expect_turns=False))
        self._next_poll = self._next_beat = self.now
        self._ancestors = Ancestors(self, self.loop, self.members, parent, agent)

    def _set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self._poll_s = limits.look_s
        self._beat_s = beat_s(limits.rank_timeout)
        self._clock.most = 2 * self._poll_s

    def run(self) -> None:
        """Until no member of this host is left and all has been said."""
        while True:
            calls = self.loop.wait(self._sleep_s())
            self._clock.tick(time.monotonic())
            for call in calls:
                call()
            if self.now >= self._next_poll:
                self._next_poll = self.now + self._poll_s
                self.members.poll()
            if self.now >= self._next_beat:
                self._next_beat = self.now + self._beat_s
                self.members.beat()
                if self.probe is not None:
                    self.probe.tick()
                if self.head is not None:
                    self.head.tick()
                if self.uplink is not None:
                    self.uplink.tick(self.members.table())
            self._judge()
            self.drain.go_on()
            if self._may_leave():
                return

    def _sleep_s(self) -> float:
        times = [self._next_poll, self._next_beat, self._kill_at, None if self.over else self._arbiter.due()]
        return max(0.0, min(at for at in times if at is not None) - self.now)

    @property
    def now(self) -> float:
        return self._clock.now

    @property
    def over(self) -> bool:
        """Nothing is a failure any more."""
        return self.root_cause is not None or self.has_ended

    def host_of(self, rank: int) -> str:
        """The host of a rank of the job."""
        nodes = zip(self.config.hostnames, self.config.ranks, strict=True) if self.config is not None else ()
        return next((host for host, ranks in nodes if rank in ranks), self.host)

    def report_failure(self, failure: FailureReport) -> None:
        """Somebody is gone or stuck: judged here if this is the head, and there otherwise."""
        if self.over:
            return
        judged_there = self.uplink is not None and self.uplink.is_joined and failure.key != HEAD_KEY
        if not self._arbiter.hear(failure, self.now, _HIGHER_COURT_S if judged_there else 0.0):
            return
        if self.uplink is not None:
            self.uplink.tell({"t": "report_failure", "failure": failure.to_json()})
        if failure.weight in (Weight.HUNG, Weight.IDLE_DRIVER, Weight.IDLE):
            self.ask_for_stacks()

    def somebody_died(self) -> None:
        """Before a member is accused of it: is it the end of its ancestors?"""
        self._ancestors.look()

    def retract(self, key: str) -> None:
        """The accused has shown life before the verdict."""
        if self._arbiter.retract(key) and self.uplink is not None:
            self.uplink.tell({"t": "retract", "key": key})

    def ask_for_stacks(self) -> None:
        """On all hosts, from the head; else on this one."""
        if self.now - self._stacks_at < _STACKS_AGAIN_S:
            return
        self._stacks_at = self.now
        self.members.ask_for_stacks()
        if self.head is not None:
            self.head.broadcast({"t": "stacks"})

    def _judge(self) -> None:
        if not self.over:
            first = self._arbiter.root_cause(self.now)
            if first is not None:
                self._declare(first)
        if self._kill_at is not None and self.now >= self._kill_at:
            self._kill_at = None
            self.members.kill()

    def _declare(self, first: FailureReport) -> None:
        detect_s = round((first.age_s or 0.0) + self._arbiter.waited(first.key, self.now), 3)
        self.declare(RootCause(first.cause, first.rank, first.host, time.time(), detect_s))

    def declare(self, root_cause: RootCause) -> None:
        """Once: tell everybody, and end whoever does not end by itself."""
        if self.over:
            return
        self.root_cause = root_cause
        self.serving.failed(root_cause)
        self._kill_at = self.now + self._grace_s
        for events in self.events():
            self.followers.tell(events)
            self.members.tell(events)
            if self.head is not None:
                self.head.broadcast(events)

    # What members ask for.

    def request(self, member: Member, message: Message) -> None:
        """A member's message that is not about itself."""
        kind, reply = message["t"], {"t": "reply", "id": message.get("id")}
        if kind == "listen":
            member.tell(reply | self._listen(str(message["address"])))
        elif kind == "configure":
            member.tell(reply | self._configure(WatchConfig.from_json(message["config"])))
        elif kind == "identify":
            self.drain.go_on()
        elif kind == "drain":
            self.request_drain(str(message["reason"]))
        elif kind == "end":
            self.end(lambda: member.tell(reply), End.from_json(message))
        elif kind == "serving":
            self.serves(message)
        elif kind == "probe":
            member.tell(reply | self._open_probe(int(message["port"])))
        elif kind == "view":
            member.tell(reply | {"view": self.view()})

    def _listen(self, address: str) -> Message:
        try:
            self.head = self.head or Head(self, self.loop, address)
        except OSError as problem:
            return {"error": f"the watcher cannot listen at {address}: {problem.strerror}"}
        return {"port": self.head.port}

    def _open_probe(self, port: int) -> Message:
        try:
            self.probe = self.probe or Probe(self, self.loop, port)
        except OSError as problem:
            return {"error": problem.strerror or str(problem)}
        return {"port": self.probe.port}

    def _configure(self, config: WatchConfig) -> Message:
        if self.config is not None:
            same = self.config == config
            return {} if same else {"error": "the watcher is configured already, differently"}
        if config.node == 0 and len(config.hostnames) > 1 and self.head is None:
            return {"error": "the head's watcher does not listen yet: call listen() first"}
        self.config = config
        self.host = config.hostnames[config.node]
        self._grace_s = config.grace_s
        self._set_limits(Limits(config.rank_timeout, config.step_timeout, config.expect_turns))
        self.members.tell(self.rules())
        if config.node != 0:
            # Which host is the head comes out at the rendezvous only, so others may have listened too.
            if self.head is not None:
                self.head.close()
                self.head = None
            self.uplink = Uplink(self, self.loop, config)
        elif self.head is not None:
            self.head.configure(config)
        self._next_beat = self.now
        return {}

    def rules(self) -> Message:
        """What members must know of the limits."""
        return {
            "t": "watch",
            "hostname": self.host,
            "rank_timeout": self.limits.rank_timeout,
            "grace_s": self._grace_s,
        }

    def greeting(self) -> list[Message]:
        """What has happened before a new member came."""
        if self.root_cause is not None:
            self._kill_at = self.now + self._grace_s
        return self._outcome()

    def events(self) -> list[Message]:
        """What a newly connected host or follower must know."""
        serving = [self.serving.events()] if self.serving.all else []
        return self._outcome() or self.drain.events() or serving

    def _outcome(self) -> list[Message]:
        if self.root_cause is not None:
            return [{"t": "root_cause", "root_cause": self.root_cause.to_json()}]
        return [self._end_event()] if self.has_ended else []

    def _end_event(self) -> Message:
        return {"t": "end", **self._end.to_json()}

    def joined(self) -> None:
        """The head can be reached: tell it what has happened so far."""
        assert self.uplink is not None
        for failure in self._arbiter.heard:
            self.uplink.tell({"t": "report_failure", "failure": failure.to_json()})
        for message in self.drain.events():
            self.uplink.tell(message)

    # Serving, drain and normal end.

    def serves(self, message: Message) -> None:
        """An endpoint takes requests."""
        if self.uplink is not None:
            self.uplink.tell(message)
        elif self.serving.hear(message) and self.head is not None:
            self.head.broadcast(self.serving.events())

    def request_drain(self, reason: str) -> None:
        """Somebody wants the job to finish what it does and end.

        torchrun asks for it too when one of its ranks has died: then the job has failed, and says so soon.
        """
        if not self._arbiter.has_death:
            self.drain.request(reason)

    def end(self, then: Callable[[], None], end: End) -> None:
        """A part of the job has ended normally; `then` is called when all have, and all hosts know."""
        first = self._arbiter.first() if self._arbiter.has_death else None
        if first is not None:
            # Ranks of other hosts must not end with code 0: their agents would take no part in a restart.
            self._declare(first)
            return
        if self.uplink is not None and self.uplink.is_joined:
            # The head answers with the same message once all parts have ended.
            self._after_end.append(then)
            self.uplink.tell({"t": "end", **end.to_json()})
            return
        self._ends.append(end)
        self._at_end.append(then)
        parts = {one.part for one in self._ends}
        if len(parts) < end.of:
            return
        early = {one.part for one in self._ends if one.early} == parts
        self.ended(End(code=max(one.code for one in self._ends), early=early))
        waiting, self._at_end = self._at_end, []
        for then in waiting:
            if self.head is not None:
                self.head.end(self._end_event(), then)
            else:
                then()

    def ended(self, end: End) -> None:
        """From now on deaths are no failures; ranks end as `end` says."""
        if not self.over:
            self.has_ended, self._end = True, end
            self._kill_at = self.now + _END_S
            self.followers.tell(self._end_event())
            self.members.tell(self._end_event())
        waiting, self._after_end = self._after_end, []
        for then in waiting:
            then()

    def view(self) -> Message:
        """The job as this watcher sees it."""
        return status.build(self)

    def troubles(self) -> list[Message]:
        """See `Members.troubles`."""
        return self.members.troubles()

    def _may_leave(self) -> bool:
        if self.members.alive or self._ancestors.parent_may_join:
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = self.now
        first = self._arbiter.first()
        if first is not None and not self.over:
            if self.now - self._alone_since < _REPORT_S:
                return False
            if self.uplink is None:
                self._declare(first)
        farewell: Message = {"t": "bye"}
        if self.uplink is not None:
            self.uplink.tell(farewell)
        if self.head is not None:
            self.head.broadcast(farewell)
        if self.root_cause is not None:
            # Behind everything that this host's members have printed.
            log(f"the job has failed: {self.root_cause.cause}")
        return True
