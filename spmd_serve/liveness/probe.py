"""``--probe-port``: /live, /ready and /metrics of this node's ranks, answered by the watcher's own loop.

A few lines of HTTP instead of a server in a thread or h11: the answer comes from the loop that decides, needs
no lock, and a watcher that hangs fails its probe. Only the request line is read.
"""

import errno
import json
import socket
from collections.abc import Callable
from typing import Any

from spmd_serve.liveness import metrics
from spmd_serve.liveness.event_loop import Connection, Listener, Loop
from spmd_serve.wire.lines import Message

_LONGEST_LINE = 8192
_MOST_LINES = 100
_MOST_CONNECTIONS = 64
_LIMIT_S = 5.0
"""How long a client may take to ask and to read, seconds."""

Answer = tuple[int, str, str]
"""Status, content type, body."""


class Probe:
    """The listening socket and its connections; each connection gets one answer."""

    def __init__(
        self,
        loop: Loop,
        port: int,
        now: Callable[[], float],
        status: Callable[[], Message],
        troubles: Callable[[], list[Message]],
    ) -> None:
        """Listen at all addresses of this machine; 0: a port that the kernel chooses. Raises OSError.

        `now()`: seconds.  `status()`, `troubles()`: what is answered; called at most once per turn of the
        loop.
        """
        sock = _listen(port)
        self.port: int = sock.getsockname()[1]
        self._now = now
        self._status = status
        self._troubles = troubles
        self._loop = loop
        self._open: dict[Connection, float] = {}
        self._answers: dict[bytes, bytes] = {}
        self._answered: Message | None = None
        self._listener = Listener(loop, sock, self._on_connection)

    def tick(self) -> None:
        """Call every beat: close the connections that are answered or take too long."""
        self._listener.resume()
        for connection, since in list(self._open.items()):
            if not connection.is_open or self._now() - since > _LIMIT_S:
                self._close(connection)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._listener.close()
        for connection in list(self._open):
            self._close(connection)

    def _on_connection(self, sock: socket.socket) -> None:
        if len(self._open) >= _MOST_CONNECTIONS:
            self._close(next(iter(self._open)))  # the oldest
        lines: list[bytes] = []

        def on_line(line: bytes) -> None:
            lines.append(line)
            if not line.strip() or len(lines) > _MOST_LINES:
                connection.send_last(self._respond(lines[0]))

        connection = Connection(self._loop, sock, on_line, lambda _: self._close(connection), _LONGEST_LINE)
        self._open[connection] = self._now()

    def _respond(self, request_line: bytes) -> bytes:
        """Return the response; build it once per turn of the loop, however many clients ask."""
        status = self._status()
        if status is not self._answered:
            self._answered = status
            self._answers.clear()
        if request_line not in self._answers and len(self._answers) < _MOST_CONNECTIONS:
            self._answers[request_line] = respond(request_line, status, self._troubles)
        return self._answers.get(request_line) or respond(request_line, status, self._troubles)

    def _close(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        connection.close()


def respond(request_line: bytes, status: Message, troubles: Callable[[], list[Message]]) -> bytes:
    """Return the whole response to a request."""
    method, _, rest = request_line.decode("latin-1").strip().partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        code, kind, body = _as_json(405, {"error": "GET only"})
    else:
        code, kind, body = answer(path, status, troubles)
    reason = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}[code]
    data = body.encode()
    head = (
        f"HTTP/1.1 {code} {reason}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else data)


def answer(path: str, status: Message, troubles: Callable[[], list[Message]]) -> Answer:
    """Return what a probe is told."""
    if path == "/metrics":
        return 200, metrics.CONTENT_TYPE, metrics.render(status)
    if path not in ("/live", "/ready"):
        return _as_json(404, {"error": "here are /live, /ready and /metrics"})
    if status["root_cause"] is not None:
        return _as_json(503, {"status": "failed", **status["root_cause"]})
    if path == "/live":
        found = troubles()
        return (
            _as_json(503, {"status": "stuck", "ranks": found}) if found else _as_json(200, {"status": "live"})
        )
    if status["draining"] is not None:
        return _as_json(503, {"status": "draining", "cause": status["draining"]})
    if not metrics.is_ready(status):
        return _as_json(503, {"status": "ended" if status["ended"] else "loading"})
    return _as_json(200, {"status": "ready"})


def _as_json(code: int, body: dict[str, Any]) -> Answer:
    return code, "application/json", json.dumps(body) + "\n"


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    except OSError as problem:
        if problem.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    except ValueError:
        pass  # the kernel was started without IPv6 (ipv6.disable=1)
    return socket.create_server(("", port), backlog=128)
