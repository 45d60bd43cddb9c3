"""The head's side of the connections between watchers: one from the watcher of every other node."""

import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from spmd_serve.liveness import descriptions
from spmd_serve.liveness.decision import RootCauseDecision
from spmd_serve.liveness.event_loop import Connection, Listener, Loop, log
from spmd_serve.liveness.protocol import beat_s
from spmd_serve.liveness.root_cause import FailureReport, Weight, node_key, patience_s
from spmd_serve.liveness.state import WatcherState
from spmd_serve.wire.lines import BadLine, Message, Seal, pack

HELLO_BYTES = 4096
"""The longest line of a connection that has not authenticated yet, bytes."""
_MOST_PENDING = 64
_PENDING_S = 10.0


def silence_s(rank_timeout: float) -> float:
    """Return after how many seconds without a message from its watcher a node is reported."""
    # The last message was sent up to one beat before.
    return patience_s(rank_timeout, Weight.NODE, beat_s(rank_timeout) / 2)


@dataclass(eq=False)
class Node:
    """One connection; `number` is None until it has proven to be a node of this job."""

    connection: Connection
    seal: Seal
    peer: str
    since: float
    number: int | None = None
    heard: float = 0.0
    table: list[Message] = field(default_factory=list)
    drained: bool = False
    knows_end: bool = False
    left: bool = False

    def send(self, message: Message, droppable: bool = False) -> None:
        """Send a message; drop a droppable one if the node does not read."""
        # The seal counts each line, so a line is dropped before it is wrapped or not at all.
        if not droppable or not self.connection.is_clogged:
            self.connection.send(self.seal.wrap(message))


class Head:
    """Listens for the watchers of the other nodes, and reports those that are silent or gone."""

    def __init__(
        self,
        state: WatcherState,
        decision: RootCauseDecision,
        loop: Loop,
        address: str,
        events: Callable[[], list[Message]],
        on_message: Callable[[Message], None],
    ) -> None:
        """Bind a port that the kernel chooses at `address`; connections wait there until `accept`.

        `events()`: what a newly connected node must know.  `on_message`: gets each message about the job.
        Raises OSError.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind((address, 0))
            self._socket.listen(1024)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self.nodes: dict[int, Node] = {}
        self._state = state
        self._decision = decision
        self._loop = loop
        self._events = events
        self._on_message = on_message
        self._listener: Listener | None = None
        self._accepting_since = 0.0
        self._pending: list[Node] = []
        self._after_end: list[Callable[[], None]] = []
        self._logged = 0

    def accept(self) -> None:
        """Accept connections from now on: the configuration says which nodes to expect."""
        if self._listener is None:
            self._accepting_since = self._state.now
            self._listener = Listener(self._loop, self._socket, self._on_connection)

    def close(self) -> None:
        """Stop listening before `accept`, on a node that is not the head."""
        self._socket.close()

    def broadcast(self, message: Message, droppable: bool = False) -> None:
        """Send a message to all nodes."""
        for node in self.nodes.values():
            node.send(message, droppable)

    @property
    def all_drained(self) -> bool:
        """Whether nothing is in flight on any other node."""
        return all(node.drained or node.left for node in self.nodes.values())

    def end(self, message: Message, then: Callable[[], None]) -> None:
        """Tell all nodes that the job ends normally; call `then` when all of them know."""
        self._after_end.append(then)
        self.broadcast(message)
        self._check_end()

    def tick(self) -> None:
        """Call every beat: send the beat, and report nodes that are silent or missing."""
        self.broadcast({"t": "beat"}, droppable=True)
        now = self._state.now
        for node in [one for one in self._pending if now - one.since > _PENDING_S]:
            self._drop(node, "it did not authenticate in time")
        if self._listener is None:
            return
        self._listener.resume()
        config = self._state.config
        if config is None or self._decision.over:
            return
        for number in range(1, len(self._state.hostnames)):
            where, known = self._state.describe(number), self.nodes.get(number)
            if known is None:
                if now - self._accepting_since > config.join_timeout:
                    self._report(number, descriptions.not_joined(where, config.join_timeout), None)
            elif not known.left and now - known.heard > silence_s(config.rank_timeout):
                age_s = now - known.heard
                self._report(number, descriptions.node_silent(where, age_s), age_s)

    def _report(self, number: int, cause: str, age_s: float | None) -> None:
        rank, hostname = self._state.only_rank(number), self._state.hostnames[number]
        failure = FailureReport(node_key(number), Weight.NODE, cause, rank, hostname, number, age_s)
        self._decision.report_failure(failure)

    # Connections.

    def _on_connection(self, sock: socket.socket) -> None:
        config, address = self._state.config, sock.getpeername()
        assert config is not None
        if len(self._pending) >= _MOST_PENDING:
            self._drop(self._pending[0], "too many connections have not authenticated")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seal = Seal(config.key, "head", "node")

        def on_line(line: bytes) -> None:
            message = node.seal.open(line)
            if node.number is None:
                self._welcome(node, message)
            else:
                self._handle(node, node.number, message)

        connection = Connection(
            self._loop, sock, on_line, lambda reason: self._closed(node, reason), HELLO_BYTES
        )
        node = Node(connection, seal, f"{address[0]} port {address[1]}", self._state.now)
        self._pending.append(node)
        nonce = secrets.token_hex(16)
        connection.send(pack({"t": "challenge", "nonce": nonce}))
        seal.mix(nonce)

    def _welcome(self, node: Node, message: Message) -> None:
        config = self._state.config
        assert config is not None
        round_id, number, nonce = str(message["round_id"]), message["node"], str(message["nonce"])
        if message["t"] != "hello" or not hmac.compare_digest(round_id.encode(), config.round_id.encode()):
            raise BadLine("it belongs to another round")
        if type(number) is not int or not 0 < number < len(self._state.hostnames) or number in self.nodes:
            raise BadLine(f"node {number} is not expected, or has connected already")
        node.seal.mix(nonce)
        node.connection.trust()
        self._pending.remove(node)
        node.number, node.heard = number, self._state.now
        self.nodes[number] = node
        for event in ({"t": "welcome"}, *self._events()):
            node.send(event)

    def _handle(self, node: Node, number: int, message: Message) -> None:
        node.heard = self._state.now
        self._decision.retract(node_key(number))
        kind = message["t"]
        if kind == "beat":
            node.table = [dict(row) for row in message["table"]]
        elif kind == "drained":
            node.drained = True
        elif kind == "end-known":
            node.knows_end = True
            self._check_end()
        elif kind == "bye":
            node.left = node.knows_end = True
            self._check_end()
        else:
            self._on_message(message)

    def _closed(self, node: Node, reason: str) -> None:
        if node.number is None:
            self._drop(node, reason or "it closed the connection")
            return
        left, node.left, node.knows_end = node.left, True, True
        self._check_end()
        if not left and not self._decision.over:
            where, silent_s = self._state.describe(node.number), self._state.now - node.heard
            log(f"the connection from {where} is closed{f': {reason}' if reason else ''}")
            rank_timeout = self._state.limits.rank_timeout
            self._report(node.number, descriptions.node_lost(where, silent_s, rank_timeout), silent_s)

    def _drop(self, node: Node, reason: str) -> None:
        node.connection.close()
        self._pending.remove(node)
        self._logged += 1
        if self._logged <= _MOST_PENDING:
            log(f"dropped a connection from {node.peer}: {reason}")

    def _check_end(self) -> None:
        if all(node.knows_end for node in self.nodes.values()):
            waiting, self._after_end = self._after_end, []
            for then in waiting:
                then()
