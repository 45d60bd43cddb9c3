"""The head's side of the watch between hosts: one TCP connection from the watcher of every other host."""

import hmac
import secrets
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spmd_serve.liveness import descriptions
from spmd_serve.liveness.event_loop import Conn, Loop, log
from spmd_serve.liveness.protocol import End, WatchConfig, beat_s
from spmd_serve.liveness.root_cause import FailureReport, Weight, host_key, patience_s
from spmd_serve.wire.lines import BadLine, Message, Seal, pack

HELLO_BYTES = 4096
_STRANGERS = 64
_STRANGER_S = 10.0


def silence_s(rank_timeout: float) -> float:
    """Seconds without a word from another host's watcher until that host is accused."""
    return patience_s(
        rank_timeout, Weight.HOST, beat_s(rank_timeout) / 2
    )  # its last one was up to a beat ago


class HeadCourt(Protocol):
    """What the head's watcher does with what the others report."""

    @property
    def now(self) -> float: ...
    @property
    def over(self) -> bool: ...
    def report_failure(self, failure: FailureReport) -> None: ...
    def retract(self, key: str) -> None: ...
    def request_drain(self, reason: str) -> None: ...
    def serves(self, message: Message) -> None: ...
    def end(self, then: Callable[[], None], end: End) -> None: ...
    def events(self) -> list[Message]: ...


@dataclass
class Node:
    """One connection; `number` is None until it has proven to be a host of this job."""

    conn: Conn
    seal: Seal
    peer: str
    since: float
    number: int | None = None
    heard: float = 0.0
    table: list[Message] = field(default_factory=list)
    drained: bool = False
    knows_end: bool = False
    left: bool = False

    def tell(self, message: Message, droppable: bool = False) -> None:
        # Each wrapped line counts in the seal, so a line is dropped before it is wrapped or never.
        if not droppable or not self.conn.is_clogged:
            self.conn.send(self.seal.wrap(message))


class Head:
    """Listens for the other hosts' watchers, and notices which of them is silent or gone."""

    def __init__(self, court: HeadCourt, loop: Loop, address: str) -> None:
        """Bind a port of the kernel's choice at `address`; connections wait there until `configure`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._court = court
        self._loop = loop
        self._config: WatchConfig | None = None
        self._configured_at = 0.0
        self._strangers: list[Node] = []
        self.nodes: dict[int, Node] = {}
        self._after_end: list[Callable[[], None]] = []
        self._logged = 0

    def configure(self, config: WatchConfig) -> None:
        """Who is expected; from now on connections are taken."""
        if self._config is None:
            self._config = config
            self._configured_at = self._court.now
            self._loop.watch(self._listener.fileno(), self._accept, selectors.EVENT_READ)

    def close(self) -> None:
        """Before `configure`, on a host that turns out not to be the head."""
        self._listener.close()

    def broadcast(self, message: Message, droppable: bool = False) -> None:
        """Tell all hosts."""
        for node in self.nodes.values():
            node.tell(message, droppable)

    def end(self, message: Message, then: Callable[[], None]) -> None:
        """Tell all hosts that the job ends normally; `then` is called when all of them know."""
        self._after_end.append(then)
        self.broadcast(message)
        self._check_end()

    def tick(self) -> None:
        """Call every beat: sends the beat, and looks who is silent or missing."""
        self.broadcast({"t": "beat"}, droppable=True)
        config, now = self._config, self._court.now
        for stranger in [one for one in self._strangers if now - one.since > _STRANGER_S]:
            self._drop(stranger, "said nothing")
        if config is None or self._court.over:
            return
        for number in range(1, len(config.hostnames)):
            where = descriptions.node(config.hostnames[number], config.ranks[number])
            node = self.nodes.get(number)
            if node is None:
                if now - self._configured_at > config.join_timeout:
                    self._report_failure(number, descriptions.not_joined(where, config.join_timeout), None)
            elif not node.left and now - node.heard > silence_s(config.rank_timeout):
                self._report_failure(
                    number, descriptions.node_silent(where, now - node.heard), now - node.heard
                )

    def _report_failure(self, number: int, cause: str, age_s: float | None) -> None:
        assert self._config is not None
        ranks = self._config.ranks[number]
        rank = ranks[0] if len(ranks) == 1 else None
        host = self._config.hostnames[number]
        self._court.report_failure(
            FailureReport(host_key(number), Weight.HOST, cause, rank, host, number, age_s)
        )

    # Connections.

    def _accept(self, _events: int) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _STRANGERS:
            sock.close()
            return
        assert self._config is not None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seal = Seal(self._config.key, "head", "node")

        def on_line(line: bytes) -> None:
            message = node.seal.open(line)
            try:
                if node.number is None:
                    self._welcome(node, message)
                else:
                    self._hear(node, message)
            except (KeyError, TypeError, ValueError) as problem:
                raise BadLine(f"a bad {message['t']} message: {problem!r}") from problem

        conn = Conn(self._loop, sock, on_line, lambda reason: self._closed(node, reason), HELLO_BYTES)
        node = Node(conn, seal, f"{address[0]} port {address[1]}", self._court.now)
        self._strangers.append(node)
        nonce = secrets.token_hex(16)
        conn.send(pack({"t": "challenge", "nonce": nonce}))
        seal.mix(nonce)

    def _welcome(self, node: Node, message: Message) -> None:
        assert self._config is not None
        number = int(message["node"])
        if message["t"] != "hello" or not hmac.compare_digest(
            str(message["round_id"]).encode(), self._config.round_id.encode()
        ):
            raise BadLine("it belongs to another run")
        if not 0 < number < len(self._config.hostnames) or number in self.nodes:
            raise BadLine(f"node {number} is not expected, or here already")
        node.seal.mix(str(message["nonce"]))
        node.conn.trust()
        self._strangers.remove(node)
        node.number, node.heard = number, self._court.now
        self.nodes[number] = node
        node.tell({"t": "welcome"})
        for events in self._court.events():
            node.tell(events)

    def _hear(self, node: Node, message: Message) -> None:
        assert node.number is not None
        node.heard = self._court.now
        self._court.retract(host_key(node.number))
        kind = message["t"]
        if kind == "beat":
            node.table = list(message["table"])
        elif kind == "report_failure":
            self._court.report_failure(FailureReport.from_json(message["failure"]))
        elif kind == "retract":
            self._court.retract(str(message["key"]))
        elif kind == "serving":
            self._court.serves(message)
        elif kind == "drain":
            self._court.request_drain(str(message["reason"]))
        elif kind == "drained":
            node.drained = True
        elif kind == "end":
            self._court.end(lambda: None, End.from_json(message))
        elif kind == "end-known":
            node.knows_end = True
            self._check_end()
        elif kind == "bye":
            node.left = node.knows_end = True
            self._check_end()

    def _closed(self, node: Node, reason: str) -> None:
        if node.number is None:
            self._drop(node, reason or "it closed the connection")
            return
        left, node.left, node.knows_end = node.left, True, True
        self._check_end()
        if not left and not self._court.over:
            assert self._config is not None
            where = descriptions.node(self._config.hostnames[node.number], self._config.ranks[node.number])
            log(f"the connection from {where} is closed{f': {reason}' if reason else ''}")
            silent_s = self._court.now - node.heard
            self._report_failure(
                node.number, descriptions.node_lost(where, silent_s, self._config.rank_timeout), silent_s
            )

    def _drop(self, stranger: Node, reason: str) -> None:
        stranger.conn.close()
        self._strangers.remove(stranger)
        self._logged += 1
        if self._logged <= _STRANGERS:
            log(f"dropped a connection from {stranger.peer}: {reason}")

    def _check_end(self) -> None:
        if all(node.knows_end for node in self.nodes.values()):
            waiting, self._after_end = self._after_end, []
            for then in waiting:
                then()
