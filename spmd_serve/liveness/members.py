"""The members of this node: which processes are registered and alive, and whether they make progress."""

import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spmd_serve.liveness import descriptions
from spmd_serve.liveness.decision import RootCauseDecision
from spmd_serve.liveness.event_loop import Connection, Listener, Loop, log
from spmd_serve.liveness.hang import TROUBLES, Progress, Sighting, Trouble
from spmd_serve.liveness.procfs import OomCounter, ProcFile, ProcStat, catches, ending_of
from spmd_serve.liveness.protocol import KINDS, STACKS_SIGNAL, Hello
from spmd_serve.liveness.root_cause import FailureReport, Weight
from spmd_serve.liveness.stacks import ask_in_turn
from spmd_serve.liveness.state import WatcherState
from spmd_serve.liveness.status_table import EntryReading, StatusTable
from spmd_serve.liveness.subscribers import Subscriber, Subscribers
from spmd_serve.system.process import has_ended, open_pidfd, send_signal
from spmd_serve.wire.lines import Message, pack, unpack


@dataclass
class Member:
    """One registered process of this node."""

    hello: Hello
    pid: int
    pidfd: int
    stat: ProcFile
    connection: Connection
    entry: int
    writes_stacks: bool
    progress: Progress = field(default_factory=Progress)
    look: ProcStat | None = None
    alive: bool = True
    excused: bool = False
    """Whether its death needs no report: it has announced its end, or its failure is reported."""
    drains: bool = False
    """Whether it has been told that the job drains."""

    def send(self, message: Message) -> None:
        """Send a message to this member."""
        self.connection.send(pack(message))

    def row(self, reading: EntryReading | None) -> Message:
        """Return the member's row of the status; `reading` is None if it is gone. Ages are in seconds."""
        now, state, since = time.monotonic(), "gone", 0.0
        if reading is not None:
            state = "stopped" if self.look is not None and self.look.stopped else reading.state
            since = reading.started_at if reading.started > reading.done else reading.works_since
        return {
            "kind": self.hello.kind,
            "name": self.hello.name,
            "rank": self.hello.rank,
            "pid": self.pid,
            "state": state,
            "steps": reading.done if reading else None,
            "in_flight_s": round(now - since, 3) if since else None,
            "age_s": round(now - reading.last_sign, 3) if reading and reading.last_sign else None,
            "cpu_s": self.look.cpu_s if self.look else None,
            "busy_s": round(reading.busy_s, 3) if reading else None,
            "sent": reading.sent if reading else None,
            "host_bytes": reading.host_bytes if reading else None,
            "network_bytes": reading.network_bytes if reading else None,
            "send_s": round(reading.send_s, 6) if reading else None,
        }


@dataclass(frozen=True)
class MemberCallbacks:
    """What the watcher does for its members.

    status(): the status of the job.  greeting(): what has happened before a new member came.  events(): the
    same for a new subscriber.  on_request(member, message): a message that is not about the member itself.
    on_death(): a member has died, and its failure is not reported yet.
    """

    status: Callable[[], Message]
    greeting: Callable[[], list[Message]]
    events: Callable[[], list[Message]]
    on_request: Callable[[Member, Message], None]
    on_death: Callable[[], None]


class Members:
    """All members of this node, their connections and their descriptors."""

    def __init__(
        self,
        state: WatcherState,
        decision: RootCauseDecision,
        subscribers: Subscribers,
        loop: Loop,
        listener: socket.socket,
        callbacks: MemberCallbacks,
    ) -> None:
        self._state = state
        self._decision = decision
        self._subscribers = subscribers
        self._loop = loop
        self._callbacks = callbacks
        self._takes_members = True
        self._listener = Listener(loop, listener, self._on_connection)
        self._status_table = StatusTable()
        self._oom = OomCounter()
        self.all: list[Member] = []

    @property
    def alive(self) -> list[Member]:
        """The members that have not died."""
        return [member for member in self.all if member.alive]

    def send(self, message: Message) -> None:
        """Send a message to every member."""
        for member in self.alive:
            member.send(message)

    def beat(self) -> None:
        """Send every member a heartbeat, except to those that do not read (they may hold the GIL)."""
        self._listener.resume()
        for member in self.alive:
            if not member.connection.is_clogged:
                member.send({"t": "beat"})

    def stop_registration(self) -> None:
        """Accept no new members, and free the address for the next round's watcher. Idempotent."""
        self._takes_members = False
        self._listener.close()

    def ask_for_stacks(self) -> None:
        """Ask every member that can do so to write the stacks of all its threads to its stderr."""
        able = [
            member for member in self.alive if member.writes_stacks and catches(member.pid, STACKS_SIGNAL)
        ]
        if able:
            log(f"asking {', '.join(member.hello.name for member in able)} for stacks")
            ask_in_turn([member.pidfd for member in able])

    def kill(self) -> None:
        """Send SIGKILL to every remaining member."""
        for member in self.alive:
            log(f"{self._describe(member)} has not ended by itself: SIGKILL")
            send_signal(member.pidfd, signal.SIGKILL)

    def poll(self) -> None:
        """Check every member once."""
        for member in self.alive:
            self._check(member)

    def table(self) -> list[Message]:
        """Return one row per member, for the status and for the head's watcher."""
        return [
            member.row(self._status_table.read(member.entry) if member.alive else None) for member in self.all
        ]

    def troubles(self) -> list[Message]:
        """Return the ranks of this node that are gone, stopped, stuck or idle for too long."""
        found: list[Message] = []
        for member in self.all:
            trouble = member.progress.trouble(self._state.limits, self._state.now)
            what = "gone" if not member.alive else trouble[0] if trouble is not None else None
            if member.hello.kind == "rank" and what is not None and not self._decision.over:
                found.append({"rank": member.hello.rank, "pid": member.pid, "trouble": what})
        return found

    # Registration.

    def _on_connection(self, sock: socket.socket) -> None:
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid() or pid == 0:
            log(f"refused a connection of user {uid}")
            sock.close()
            return
        member: Member | None = None
        subscriber: Subscriber | None = None

        def on_line(line: bytes) -> None:
            nonlocal member, subscriber
            message = unpack(line)
            if member is not None:
                self._on_message(member, message)
            elif message["t"] == "view":
                # A peer that does not read gets no status: there must be room for events.
                if not connection.is_clogged:
                    status = self._callbacks.status()
                    connection.send(pack({"t": "reply", "id": message.get("id"), "view": status}))
            elif subscriber is not None:
                self._subscribers.on_message(subscriber, message)
            elif message["t"] == "follow":
                drain_s = float(message["drain_s"])
                subscriber = self._subscribers.add(connection, drain_s, self._callbacks.events())
            else:
                member = self._register(connection, pid, message)

        def on_close(reason: str) -> None:
            if subscriber is not None:
                self._subscribers.remove(subscriber)
            # A process that ends without having read all heartbeats resets its connection.
            if reason and reason != os.strerror(errno.ECONNRESET):
                log(f"dropped the connection of pid {pid}: {reason}")

        connection = Connection(self._loop, sock, on_line, on_close)

    def _register(self, connection: Connection, pid: int, message: Message) -> Member | None:
        """Return the new member; None if it was refused or is gone already."""
        # The first process of a round may find the watcher of the round before, whose members are all dead by
        # then: handle those deaths, which stop the registration, before a process is accepted.
        for member in self.alive:
            if member.alive and has_ended(member.pidfd):
                self._on_death(member)
        hello = Hello.of(message)
        pidfd = open_pidfd(pid) if self._takes_members else None
        entry = self._status_table.take() if pidfd is not None else None
        if pidfd is None or entry is None:
            connection.send(pack({"t": "refused"}))
            connection.close()
            return None
        stat = ProcFile(pid)
        member = Member(hello, pid, pidfd, stat, connection, entry, bool(message.get("stacks")))
        self.all.append(member)
        self._loop.watch_end(pidfd, lambda _events: self._on_death(member))
        welcome = {**self._state.rules(), "t": "welcome", "entry": entry, "pid": os.getpid()}
        try:
            socket.send_fds(connection.sock, [pack(welcome)], [self._status_table.fd])
        except OSError:
            return None  # gone already, which its pidfd reports
        for more in self._callbacks.greeting():
            member.send(more)
        return member

    # What members report.

    def _on_message(self, member: Member, message: Message) -> None:
        kind = message["t"]
        if kind == "leaving":
            member.excused = True
        elif kind == "identify":
            rank = message.get("rank")
            member.hello = Hello(member.hello.kind, str(message["name"]), None if rank is None else int(rank))
            self._callbacks.on_request(member, message)
        elif kind == "failed":
            if not member.excused:
                weight = Weight.PEER if message.get("peer") else Weight.OWN
                cause = descriptions.own_report(self._describe(member), str(message["cause"]))
                self._report(member, "end", weight, cause)
            member.excused = True
        else:
            self._callbacks.on_request(member, message)

    # What the watcher observes.

    def _check(self, member: Member) -> None:
        if not member.alive:
            return  # since the caller's list was made
        member.look = member.stat.read()
        if member.look is None or member.look.dying:
            self._on_death(member)
            return
        reading = self._status_table.read(member.entry)
        sighting = Sighting(
            member.look.stopped,
            reading.started,
            reading.done,
            reading.turned_at,
            reading.state,
            reading.works_since,
        )
        member.progress.see(sighting, self._state.now)
        if self._decision.over or member.excused:
            return
        trouble = member.progress.trouble(self._state.limits, self._state.now)
        for name in TROUBLES:
            if trouble is None or name != trouble[0]:
                self._decision.retract(self._key(member, name))
        if trouble is not None:
            self._report_trouble(member, *trouble, reading)

    def _report_trouble(self, member: Member, trouble: Trouble, for_s: float, reading: EntryReading) -> None:
        who, awaited = self._describe(member), reading.awaits
        blamed = None
        is_driver = member.hello.kind != "rank"
        if trouble == "stopped":
            weight, cause = Weight.OWN, descriptions.stopped(who, for_s)
        elif trouble == "stuck":
            weight, cause = Weight.HUNG, descriptions.stuck(who, reading.done + 1, for_s)
        elif trouble == "stalled" and awaited is not None:
            blamed = awaited, self._state.hostname_of(awaited)
            weight, cause = Weight.IDLE_DRIVER, descriptions.owes_reply(*blamed, who, for_s)
        elif trouble == "stalled":
            weight, cause = Weight.IDLE_DRIVER, descriptions.stalled(who, for_s)
        elif is_driver:
            weight, cause = Weight.IDLE_DRIVER, descriptions.silent(who, for_s)
        else:
            weight, cause = Weight.IDLE, descriptions.idle(who, for_s)
        self._report(member, trouble, weight, cause, for_s, blamed)

    def _on_death(self, member: Member) -> None:
        if not member.alive:
            return
        member.connection.read_now()
        member.alive = False
        if member.hello.kind == "rank":
            self.stop_registration()
        if not member.excused and not self._decision.over:
            ending = ending_of(member.pidfd, member.stat)
            out_of_memory = (ending is None or ending.signal == signal.SIGKILL) and self._oom.has_risen()
            polite = ending is None or ending.signal in (None, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            cause = descriptions.ended(self._describe(member), ending, out_of_memory)
            self._callbacks.on_death()
            self._report(member, "end", Weight.UNEXPLAINED if polite else Weight.OWN, cause)
        self._loop.forget(member.pidfd)
        os.close(member.pidfd)
        member.stat.close()
        member.connection.close()
        self._status_table.give_back(member.entry)
        # The main thread of a killed process, and so its children, may be dead a good while before its last
        # thread is: check the others now, so that an ancestor is reported at the same moment as its
        # descendants.
        for other in self.alive:
            self._check(other)

    def _report(
        self,
        member: Member,
        what: str,
        weight: Weight,
        cause: str,
        age_s: float | None = None,
        blamed: tuple[int, str] | None = None,
    ) -> None:
        """Report a failure. `blamed`: the rank, and its hostname, to be named instead of the member."""
        order = KINDS.index(member.hello.kind)
        rank, hostname = blamed or (member.hello.rank, self._state.hostname)
        key = self._key(member, what)
        self._decision.report_failure(FailureReport(key, weight, cause, rank, hostname, order, age_s))

    def _key(self, member: Member, what: str) -> str:
        return f"{self._state.hostname} {member.pid} {what}"

    def _describe(self, member: Member) -> str:
        return descriptions.member(member.hello.name, member.pid, self._state.hostname)
