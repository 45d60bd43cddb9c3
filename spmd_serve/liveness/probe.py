"""``--probe-port``: /live, /ready and /metrics of this host's ranks, answered by the watcher's own loop.

A few lines of HTTP instead of a server in a thread: the answer then comes from the loop that judges, needs no
lock, and a watcher that hangs fails its probe.
"""

import errno
import json
import socket
from typing import Any, Protocol

from spmd_serve.liveness import metrics
from spmd_serve.liveness.event_loop import Conn, Loop
from spmd_serve.wire.lines import Message

_LONGEST_LINE = 8192
_MOST_LINES = 100
_MOST_CONNECTIONS = 64
_LIMIT_S = 5.0
"""How long a client may take to ask and to read."""

Answer = tuple[int, str, str]
"""Status, content type, body."""


class ProbeCourt(Protocol):
    """What probes ask."""

    @property
    def now(self) -> float: ...
    def view(self) -> Message: ...
    def troubles(self) -> list[Message]: ...


class Probe:
    """The listening socket and its connections."""

    def __init__(self, court: ProbeCourt, loop: Loop, port: int) -> None:
        """Listen at all addresses of this host; 0: a port of the kernel's choice. Raises OSError."""
        self._court = court
        self._loop = loop
        self._listener = _listen(port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._open: dict[Conn, float] = {}
        loop.watch(self._listener.fileno(), self._accept)

    def tick(self) -> None:
        """Call every beat: closes what is answered or takes too long."""
        for conn, since in list(self._open.items()):
            if not conn.is_open or self._court.now - since > _LIMIT_S:
                self._close(conn)

    def close(self) -> None:
        """Give the port free."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._open) >= _MOST_CONNECTIONS:
            sock.close()
            return
        lines: list[bytes] = []

        def on_line(line: bytes) -> None:
            lines.append(line)
            if not line.strip() or len(lines) > _MOST_LINES:
                conn.send(respond(lines[0], self._court))
                if not conn.is_clogged:
                    self._close(conn)

        conn = Conn(self._loop, sock, on_line, lambda _reason: self._close(conn), _LONGEST_LINE)
        self._open[conn] = self._court.now

    def _close(self, conn: Conn) -> None:
        self._open.pop(conn, None)
        conn.close()


def respond(request_line: bytes, court: ProbeCourt) -> bytes:
    """The whole response to a request."""
    method, _, rest = request_line.decode("latin-1").strip().partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        status, kind, body = _as_json(405, {"error": "GET only"})
    else:
        status, kind, body = answer(path, court)
    reason = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}[status]
    data = body.encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else data)


def answer(path: str, court: ProbeCourt) -> Answer:
    """What a probe is told."""
    view = court.view()
    if path == "/metrics":
        return 200, metrics.CONTENT_TYPE, metrics.render(view)
    if path == "/live":
        troubles = court.troubles()
        if view["root_cause"] is not None:
            return _as_json(503, {"status": "failed", **view["root_cause"]})
        if troubles:
            return _as_json(503, {"status": "stuck", "ranks": troubles})
        return _as_json(200, {"status": "live"})
    if path == "/ready":
        if view["root_cause"] is not None:
            return _as_json(503, {"status": "failed", **view["root_cause"]})
        if view["draining"] is not None:
            return _as_json(503, {"status": "draining", "cause": view["draining"]})
        if not metrics.is_ready(view):
            return _as_json(503, {"status": "ended" if view["ended"] else "loading"})
        return _as_json(200, {"status": "ready"})
    return _as_json(404, {"error": "here are /live, /ready and /metrics"})


def _as_json(status: int, body: dict[str, Any]) -> Answer:
    return status, "application/json", json.dumps(body) + "\n"


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    except OSError as problem:
        if problem.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return socket.create_server(("", port), backlog=128)  # a host without IPv6
