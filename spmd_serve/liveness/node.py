"""The other hosts' side of the watch between hosts: the connection to the head's watcher."""

import errno
import os
import secrets
import selectors
import socket
from typing import Protocol

from spmd_serve.liveness import descriptions
from spmd_serve.liveness.drain import Drain
from spmd_serve.liveness.event_loop import Conn, Loop, log
from spmd_serve.liveness.head import HELLO_BYTES, silence_s
from spmd_serve.liveness.protocol import End, RootCause, WatchConfig
from spmd_serve.liveness.root_cause import HEAD_KEY, FailureReport, Weight
from spmd_serve.liveness.serving import Serving
from spmd_serve.wire.lines import BadLine, Message, Seal, unpack

_CONNECT_S = 3.0
_AGAIN_S = 0.3


class NodeCourt(Protocol):
    """What a watcher does with what the head says."""

    @property
    def now(self) -> float: ...
    @property
    def over(self) -> bool: ...
    def report_failure(self, failure: FailureReport) -> None: ...
    def retract(self, key: str) -> None: ...
    def joined(self) -> None: ...
    def declare(self, root_cause: RootCause) -> None: ...
    def ask_for_stacks(self) -> None: ...
    def request_drain(self, reason: str) -> None: ...
    @property
    def serving(self) -> Serving: ...
    @property
    def drain(self) -> Drain: ...
    def ended(self, end: End) -> None: ...


class Uplink:
    """Connects to the head's watcher, trying for `join_timeout`; then notices when it is silent or gone."""

    def __init__(self, court: NodeCourt, loop: Loop, config: WatchConfig) -> None:
        self._court = court
        self._loop = loop
        self._config = config
        self._since = court.now
        self._connecting: socket.socket | None = None
        self._next_try = court.now
        self._conn: Conn | None = None
        self._seal = Seal(config.key, "node", "head")
        self._challenged = False
        self._heard = 0.0
        self._reason = "no answer"
        self._was_joined = False
        self.is_joined = False

    def tell(self, message: Message, droppable: bool = False) -> None:
        """Tell the head, if it can be reached."""
        if self.is_joined and self._conn is not None and not (droppable and self._conn.is_clogged):
            self._conn.send(self._seal.wrap(message))

    def tick(self, table: list[Message]) -> None:
        """Call every beat: sends the beat, connects again, looks whether the head is silent."""
        self.tell({"t": "beat", "table": table}, droppable=True)
        now, config = self._court.now, self._config
        if self._court.over:
            return
        if self.is_joined:
            if now - self._heard > silence_s(config.rank_timeout):
                self._report_failure(
                    descriptions.node_silent(f"the head, {self._head()}", now - self._heard),
                    now - self._heard,
                )
        elif not self._was_joined:
            if now - self._since > config.join_timeout:
                where = descriptions.node(config.hostnames[config.node], config.ranks[config.node])
                address, port = config.head_address, config.head_port
                limit = config.join_timeout
                self._report_failure(
                    descriptions.head_unreachable(where, self._head(), address, port, limit, self._reason),
                    None,
                )
            elif self._conn is None and now >= self._next_try:
                self._try()

    def _head(self) -> str:
        return descriptions.node(self._config.hostnames[0], self._config.ranks[0])

    def _report_failure(self, cause: str, age_s: float | None) -> None:
        ranks = self._config.ranks[0]
        rank = ranks[0] if len(ranks) == 1 else None
        self._court.report_failure(
            FailureReport(HEAD_KEY, Weight.HOST, cause, rank, self._config.hostnames[0], 0, age_s)
        )

    # Connecting.

    def _try(self) -> None:
        self._give_up()
        address, port = self._config.head_address, self._config.head_port
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connecting = sock
        self._next_try = self._court.now + _CONNECT_S
        self._loop.watch(sock.fileno(), self._connected, selectors.EVENT_WRITE)
        problem = sock.connect_ex((address, port))
        if problem not in (0, errno.EINPROGRESS):
            self._failed(os.strerror(problem))

    def _connected(self, _events: int) -> None:
        assert self._connecting is not None
        problem = self._connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._failed(os.strerror(problem))
            return
        sock, self._connecting = self._connecting, None
        self._loop.forget(sock.fileno())
        self._seal = Seal(self._config.key, "node", "head")
        self._challenged = False
        self._conn = Conn(self._loop, sock, self._line, self._closed, HELLO_BYTES)

    def _failed(self, reason: str) -> None:
        self._give_up()
        self._reason = reason
        self._next_try = self._court.now + _AGAIN_S

    def _give_up(self) -> None:
        if self._connecting is not None:
            self._loop.forget(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None

    # What the head says.

    def _line(self, line: bytes) -> None:
        if not self._challenged:
            self._answer(unpack(line))
            return
        message = self._seal.open(line)
        self._heard = self._court.now
        self._court.retract(HEAD_KEY)
        try:
            self._hear(message)
        except (KeyError, TypeError, ValueError) as problem:
            raise BadLine(f"a bad {message['t']} message: {problem!r}") from problem

    def _answer(self, challenge: Message) -> None:
        if challenge["t"] != "challenge" or self._conn is None:
            raise BadLine("no challenge")
        self._challenged = True
        self._seal.mix(str(challenge.get("nonce")))
        nonce = secrets.token_hex(16)
        hello = {
            "t": "hello",
            "node": self._config.node,
            "round_id": self._config.round_id,
            "nonce": nonce,
        }
        self._conn.send(self._seal.wrap(hello))
        self._seal.mix(nonce)

    def _hear(self, message: Message) -> None:
        kind = message["t"]
        if kind == "welcome" and self._conn is not None:
            self._conn.trust()
            self.is_joined = self._was_joined = True
            self._court.joined()
        elif kind == "root_cause":
            self._court.declare(RootCause.from_json(message["root_cause"]))
        elif kind == "stacks":
            self._court.ask_for_stacks()
        elif kind == "all-serve":
            self._court.serving.hear_all(message)
        elif kind == "drain":
            self._court.request_drain(str(message["reason"]))
        elif kind == "all-drained":
            self._court.drain.all_drained()
        elif kind in ("end", "bye"):
            self.tell({"t": "end-known"})
            self._court.ended(End.from_json(message) if kind == "end" else End())

    def _closed(self, reason: str) -> None:
        self._conn = None
        if not self._was_joined:
            self._failed(reason or "it refused us: do the hosts have the same key, and belong to one run?")
            return
        self.is_joined = False
        if not self._court.over:
            log(f"the connection to the head is closed{f': {reason}' if reason else ''}")
            silent_s = self._court.now - self._heard
            where = f"the head, {self._head()}"
            self._report_failure(descriptions.node_lost(where, silent_s, self._config.rank_timeout), silent_s)
