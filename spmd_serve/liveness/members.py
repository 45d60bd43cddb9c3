"""The watcher's view of its own host: who said hello, who is alive, what each one does."""

import errno
import os
import signal
import socket
import struct
from dataclasses import dataclass, field
from typing import Protocol

from spmd_serve.liveness import descriptions, status
from spmd_serve.liveness.event_loop import Conn, Loop, log
from spmd_serve.liveness.followers import Follower, Followers
from spmd_serve.liveness.hang import TROUBLES, Limits, Progress, Sighting, Trouble
from spmd_serve.liveness.procfs import OomCounter, ProcFile, ProcStat, catches, ending_of
from spmd_serve.liveness.protocol import KINDS, STACKS_SIGNAL, Hello
from spmd_serve.liveness.root_cause import FailureReport, Weight
from spmd_serve.liveness.stacks import ask_in_turn
from spmd_serve.liveness.status_table import EntryReading, StatusTable
from spmd_serve.system.process import has_ended, open_pidfd, send_signal
from spmd_serve.wire.lines import BadLine, Message, pack, unpack


class Court(Protocol):
    """What the watcher does with what its members say and show."""

    @property
    def now(self) -> float: ...
    @property
    def host(self) -> str: ...
    def host_of(self, rank: int) -> str: ...
    @property
    def over(self) -> bool: ...
    @property
    def limits(self) -> Limits: ...
    def somebody_died(self) -> None: ...
    def report_failure(self, failure: FailureReport) -> None: ...
    def retract(self, key: str) -> None: ...
    def rules(self) -> Message: ...
    def greeting(self) -> list[Message]: ...
    def request(self, member: "Member", message: Message) -> None: ...
    def view(self) -> Message: ...
    def events(self) -> list[Message]: ...
    @property
    def followers(self) -> Followers: ...


@dataclass
class Member:
    """One process of this host that said hello."""

    hello: Hello
    pid: int
    pidfd: int
    stat: ProcFile
    conn: Conn
    entry: int
    writes_stacks: bool
    progress: Progress = field(default_factory=Progress)
    look: ProcStat | None = None
    alive: bool = True
    excused: bool = False
    """Said that it leaves, or has been accused already: its death is no news."""
    drains: bool = False
    """Has been told that the job is to finish what it does."""

    def tell(self, message: Message) -> None:
        self.conn.send(pack(message))


class Members:
    """All members of this host, their sockets and their descriptors."""

    def __init__(self, court: Court, loop: Loop, listener: socket.socket) -> None:
        self._court = court
        self._loop = loop
        self._listener: socket.socket | None = listener
        self._status_table = StatusTable()
        self._oom = OomCounter()
        self.all: list[Member] = []
        listener.setblocking(False)
        loop.watch(listener.fileno(), self._accept)

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.all if member.alive]

    def tell(self, message: Message) -> None:
        """Tell every member."""
        for member in self.alive:
            member.tell(message)

    def beat(self) -> None:
        """Show every member that its watcher lives; who does not read (may hold the GIL) is not swamped."""
        for member in self.alive:
            if not member.conn.is_clogged:
                member.tell({"t": "beat"})

    def close_door(self) -> None:
        """No new members: gives the address free for the next round's watcher at once. Idempotent."""
        if self._listener is not None:
            self._loop.forget(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def ask_for_stacks(self) -> None:
        """Have every member that can write the stacks of all its threads to its stderr."""
        able = [
            member for member in self.alive if member.writes_stacks and catches(member.pid, STACKS_SIGNAL)
        ]
        if able:
            log(f"asking {', '.join(member.hello.name for member in able)} for stacks")
            ask_in_turn([member.pidfd for member in able])

    def kill(self) -> None:
        """SIGKILL whoever is still there."""
        for member in self.alive:
            log(f"{self._who(member)} has not ended by itself: SIGKILL")
            send_signal(member.pidfd, signal.SIGKILL)

    def poll(self) -> None:
        """Look at every member once."""
        for member in self.alive:
            self._look(member)

    def table(self) -> list[Message]:
        """One row per member, for views and for the head's watcher."""
        return [
            status.row(member, self._status_table.read(member.entry) if member.alive else None)
            for member in self.all
        ]

    def troubles(self) -> list[Message]:
        """The ranks of this host that are gone, stopped, stuck or idle for too long."""
        found: list[Message] = []
        for member in self.all:
            trouble = member.progress.trouble(self._court.limits, self._court.now)
            what = "gone" if not member.alive else trouble[0] if trouble is not None else None
            if member.hello.kind == "rank" and what is not None and not self._court.over:
                found.append({"rank": member.hello.rank, "pid": member.pid, "trouble": what})
        return found

    # Arrivals.

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid() or pid == 0:
            log(f"refused a connection of user {uid}")
            sock.close()
            return
        guest: list[Member] = []
        follower: list[Follower] = []

        def on_line(line: bytes) -> None:
            message = unpack(line)
            try:
                if guest:
                    self._hear(guest[0], message)
                elif message["t"] == "view":
                    if conn.is_clogged:
                        return  # behind what is not read there must be room for news
                    conn.send(pack({"t": "reply", "id": message.get("id"), "view": self._court.view()}))
                elif follower:
                    self._court.followers.hear(follower[0], message)
                elif message["t"] == "follow":
                    drain_s = float(message["drain_s"])
                    follower.append(self._court.followers.add(conn, drain_s, self._court.events()))
                else:
                    guest.extend(self._admit(conn, pid, message))
            except (KeyError, TypeError, ValueError) as problem:
                raise BadLine(f"a bad {message['t']} message: {problem!r}") from problem

        def on_close(reason: str) -> None:
            for one in follower:
                self._court.followers.left(one)
            # A process that ends without having read all of our beats resets its connection: no news.
            if reason and reason != os.strerror(errno.ECONNRESET):
                log(f"dropped the connection of pid {pid}: {reason}")

        conn = Conn(self._loop, sock, on_line, on_close)

    def _admit(self, conn: Conn, pid: int, message: Message) -> list[Member]:
        """The new member, or nobody."""
        # A round's first process may find the watcher of the round before, whose members are all dead by
        # then: make sure that it knows of those deaths (which close its door) before it takes anybody in.
        for member in self.alive:
            if member.alive and has_ended(member.pidfd):
                self._died(member)
        hello = Hello.of(message)
        pidfd = open_pidfd(pid) if self._listener is not None else None
        entry = self._status_table.take() if pidfd is not None else None
        if pidfd is None or entry is None:
            conn.send(pack({"t": "refused"}))
            conn.close()
            return []
        stat = ProcFile(pid)
        member = Member(hello, pid, pidfd, stat, conn, entry, bool(message.get("stacks")))
        self.all.append(member)
        self._loop.watch_end(pidfd, lambda _events: self._died(member))
        welcome = {**self._court.rules(), "t": "welcome", "entry": entry, "pid": os.getpid()}
        try:
            socket.send_fds(conn.sock, [pack(welcome)], [self._status_table.fd])
        except OSError:
            return []  # gone already: its pidfd tells
        for more in self._court.greeting():
            member.tell(more)
        return [member]

    # What members say.

    def _hear(self, member: Member, message: Message) -> None:
        kind = message["t"]
        if kind == "leaving":
            member.excused = True
        elif kind == "identify":
            rank = message.get("rank")
            member.hello = Hello(member.hello.kind, str(message["name"]), None if rank is None else int(rank))
            self._court.request(member, message)
        elif kind == "failed":
            if not member.excused:
                weight = Weight.PEER if message.get("peer") else Weight.OWN
                self._report_failure(
                    member, "end", weight, descriptions.own_report(self._who(member), str(message["cause"]))
                )
            member.excused = True
        else:
            self._court.request(member, message)

    # What members show.

    def _look(self, member: Member) -> None:
        if not member.alive:
            return  # since the caller's list was made
        member.look = member.stat.read()
        if member.look is None or member.look.dying:
            self._died(member)
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
        member.progress.see(sighting, self._court.now)
        if self._court.over or member.excused:
            return
        trouble = member.progress.trouble(self._court.limits, self._court.now)
        for name in TROUBLES:
            if trouble is None or name != trouble[0]:
                self._court.retract(self._key(member, name))
        if trouble is not None:
            self._report_trouble(member, *trouble, reading)

    def _report_trouble(self, member: Member, trouble: Trouble, for_s: float, reading: EntryReading) -> None:
        who, awaited = self._who(member), reading.awaits
        if trouble == "stopped":
            self._report_failure(member, trouble, Weight.OWN, descriptions.stopped(who, for_s), for_s)
        elif trouble == "stuck":
            self._report_failure(
                member, trouble, Weight.HUNG, descriptions.stuck(who, reading.done + 1, for_s), for_s
            )
        elif trouble == "stalled" and awaited is not None:
            host = self._court.host_of(awaited)
            cause = descriptions.owes_reply(awaited, host, who, for_s)
            self._report_failure(member, trouble, Weight.IDLE_DRIVER, cause, for_s, (awaited, host))
        elif trouble == "stalled":
            self._report_failure(member, trouble, Weight.IDLE_DRIVER, descriptions.stalled(who, for_s), for_s)
        else:
            driver = member.hello.kind != "rank"
            weight = Weight.IDLE_DRIVER if driver else Weight.IDLE
            cause = descriptions.silent(who, for_s) if driver else descriptions.idle(who, for_s)
            self._report_failure(member, trouble, weight, cause, for_s)

    def _died(self, member: Member) -> None:
        if not member.alive:
            return
        member.conn.read_now()
        member.alive = False
        if member.hello.kind == "rank":
            self.close_door()
        if not member.excused and not self._court.over:
            ending = ending_of(member.pidfd, member.stat)
            out_of_memory = (ending is None or ending.signal == signal.SIGKILL) and self._oom.has_risen()
            polite = ending is None or ending.signal in (None, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            cause = descriptions.ended(self._who(member), ending, out_of_memory)
            self._court.somebody_died()
            self._report_failure(member, "end", Weight.UNEXPLAINED if polite else Weight.OWN, cause)
        self._loop.forget(member.pidfd)
        os.close(member.pidfd)
        member.stat.close()
        member.conn.close()
        self._status_table.give_back(member.entry)
        # A killed process's main thread, and so its children, may be dead a good while before its last thread
        # is: look at the others now, so that an ancestor is accused at the same moment as its descendants.
        for other in self.alive:
            self._look(other)

    def _report_failure(
        self,
        member: Member,
        what: str,
        weight: Weight,
        cause: str,
        age_s: float | None = None,
        blamed: tuple[int, str] | None = None,
    ) -> None:
        """`blamed`: the rank, and its host, that are to be named instead of the member."""
        order = KINDS.index(member.hello.kind)
        rank, host = blamed or (member.hello.rank, self._court.host)
        self._court.report_failure(
            FailureReport(self._key(member, what), weight, cause, rank, host, order, age_s)
        )

    def _key(self, member: Member, what: str) -> str:
        return f"{self._court.host} {member.pid} {what}"

    def _who(self, member: Member) -> str:
        return descriptions.member(member.hello.name, member.pid, self._court.host)
