"""The other nodes' side of the connections between watchers: the connection to the head's watcher."""

import errno
import os
import secrets
import selectors
import socket
from collections.abc import Callable

from spmd_serve.liveness import descriptions
from spmd_serve.liveness.decision import RootCauseDecision
from spmd_serve.liveness.event_loop import Connection, Loop, log
from spmd_serve.liveness.head import HELLO_BYTES, silence_s
from spmd_serve.liveness.protocol import WatchConfig
from spmd_serve.liveness.root_cause import HEAD_KEY, FailureReport, Weight
from spmd_serve.liveness.state import WatcherState
from spmd_serve.wire.lines import BadLine, Message, Seal, unpack

_CONNECT_S = 3.0
_RETRY_INTERVAL_S = 0.3


class Uplink:
    """Connects to the head's watcher within `join_timeout` seconds; then reports if it is silent or gone."""

    def __init__(
        self,
        state: WatcherState,
        decision: RootCauseDecision,
        loop: Loop,
        config: WatchConfig,
        on_joined: Callable[[], None],
        on_message: Callable[[Message], None],
    ) -> None:
        """`on_joined()`: the head can be reached.  `on_message`: gets each message about the job."""
        self._state = state
        self._decision = decision
        self._loop = loop
        self._config = config
        self._on_joined = on_joined
        self._on_message = on_message
        self._since = self._next_try = state.now
        self._connecting: socket.socket | None = None
        self._connection: Connection | None = None
        self._seal = Seal(config.key, "node", "head")
        self._challenged = False
        self._heard = 0.0
        self._reason = "no answer"
        self._was_joined = False
        self.is_joined = False

    def send(self, message: Message, droppable: bool = False) -> None:
        """Send a message to the head if it can be reached; drop a droppable one if it does not read."""
        connection = self._connection
        if self.is_joined and connection is not None and not (droppable and connection.is_clogged):
            connection.send(self._seal.wrap(message))

    def tick(self, table: list[Message]) -> None:
        """Call every beat: send the beat, connect again, and report the head if it is silent."""
        self.send({"t": "beat", "table": table}, droppable=True)
        now, config = self._state.now, self._config
        if self._decision.over:
            return
        if self.is_joined:
            silent_s = now - self._heard
            if silent_s > silence_s(config.rank_timeout):
                self._report(descriptions.node_silent(f"the head, {self._head()}", silent_s), silent_s)
        elif not self._was_joined:
            if now - self._since > config.join_timeout:
                where = self._state.describe(config.node)
                address, port, limit = config.head_address, config.head_port, config.join_timeout
                cause = descriptions.head_unreachable(where, self._head(), address, port, limit, self._reason)
                self._report(cause, None)
            elif self._connection is None and now >= self._next_try:
                self._try()

    def _head(self) -> str:
        return self._state.describe(0)

    def _report(self, cause: str, age_s: float | None) -> None:
        rank, hostname = self._state.only_rank(0), self._state.hostnames[0]
        self._decision.report_failure(FailureReport(HEAD_KEY, Weight.NODE, cause, rank, hostname, 0, age_s))

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
        self._next_try = self._state.now + _CONNECT_S
        self._loop.watch(sock.fileno(), self._on_connected, selectors.EVENT_WRITE)
        problem = sock.connect_ex((address, port))
        if problem not in (0, errno.EINPROGRESS):
            self._failed(os.strerror(problem))

    def _on_connected(self, _events: int) -> None:
        assert self._connecting is not None
        problem = self._connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._failed(os.strerror(problem))
            return
        sock, self._connecting = self._connecting, None
        self._loop.forget(sock.fileno())
        self._seal = Seal(self._config.key, "node", "head")
        self._challenged = False
        self._connection = Connection(self._loop, sock, self._on_line, self._closed, HELLO_BYTES)

    def _failed(self, reason: str) -> None:
        self._give_up()
        self._reason = reason
        self._next_try = self._state.now + _RETRY_INTERVAL_S

    def _give_up(self) -> None:
        if self._connecting is not None:
            self._loop.forget(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None

    # What the head sends.

    def _on_line(self, line: bytes) -> None:
        if not self._challenged:
            self._answer(unpack(line))
            return
        message = self._seal.open(line)
        self._heard = self._state.now
        self._decision.retract(HEAD_KEY)
        if message["t"] == "welcome" and self._connection is not None:
            self._connection.trust()
            self.is_joined = self._was_joined = True
            self._on_joined()
        else:
            self._on_message(message)

    def _answer(self, challenge: Message) -> None:
        if challenge["t"] != "challenge" or self._connection is None:
            raise BadLine("no challenge")
        self._challenged = True
        self._seal.mix(str(challenge.get("nonce")))
        nonce, config = secrets.token_hex(16), self._config
        hello = {"t": "hello", "node": config.node, "round_id": config.round_id, "nonce": nonce}
        self._connection.send(self._seal.wrap(hello))
        self._seal.mix(nonce)

    def _closed(self, reason: str) -> None:
        self._connection = None
        if not self._was_joined:
            self._failed(reason or "it refused us: do the nodes have the same key, and belong to one round?")
            return
        self.is_joined = False
        if not self._decision.over:
            log(f"the connection to the head is closed{f': {reason}' if reason else ''}")
            silent_s, where = self._state.now - self._heard, f"the head, {self._head()}"
            self._report(descriptions.node_lost(where, silent_s, self._config.rank_timeout), silent_s)
