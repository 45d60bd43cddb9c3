"""The HTTP port: bound before the model is loaded, and inherited by the API server through fork."""

import errno
import os
import socket
from dataclasses import dataclass

from spmd_serve.errors import UsageError

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean all addresses, and the address under which such a server is reached on its own machine."""

_UNCONNECTED = "01"
"""SS_UNCONNECTED in /proc/net/unix: a bound socket, whether it listens or not."""


@dataclass(frozen=True)
class HttpListener:
    """A bound socket that does not listen yet. `host`: address or path; `port`: 0 for a Unix socket."""

    sock: socket.socket
    host: str
    port: int

    def answers(self) -> bool:
        """Return whether the port accepts connections; `sock` may be closed in this process."""
        if self.sock.family == socket.AF_UNIX:
            target: str | tuple[str, int] = self.host
        else:
            target = (_WILDCARDS.get(self.host, self.host), self.port)
        with socket.socket(self.sock.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(target) == 0

    def url_of(self, *, tls: bool, address: str | None = None) -> str:
        """Return the URL for the start table and the log. `address` replaces a host that means all."""
        if self.sock.family == socket.AF_UNIX:
            return f"unix:{self.host}"
        host = address if address is not None and self.host in _WILDCARDS else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http{'s' if tls else ''}://{shown}:{self.port}"


def open_listener(host: str | None, port: int, uds: str | None) -> HttpListener:
    """Bind ``--host`` and ``--port``, or ``--uds``. No connection is accepted before `about_to_listen`.

    Raises UsageError, which names the flag, if another process has the address or this machine does not.
    """
    if uds is not None:
        return _open_unix(uds)
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    # With SO_REUSEADDR a restart may bind while old connections are in TIME_WAIT. It is cleared afterwards
    # because with it Linux lets two sockets that do not listen yet share a port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host or "", port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as problem:
        sock.close()
        raise UsageError(_bind_error(problem, host, port)) from problem
    return HttpListener(sock, host or "0.0.0.0", sock.getsockname()[1])


def about_to_listen(sock: socket.socket) -> None:
    """Let accepted connections inherit SO_REUSEADDR, or they would block a restart while in TIME_WAIT."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _bind_error(problem: OSError, host: str | None, port: int) -> str:
    if problem.errno == errno.EADDRINUSE:
        return f"--port {port} is taken by another process on this host: stop it, or give another --port"
    if problem.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host {host} is not an address of this host: leave it out (all addresses) or name one of them"
        )
    if problem.errno == errno.EACCES:
        return f"--port {port} needs more rights than this user has: give a --port above 1023"
    return f"--host {host or '0.0.0.0'} --port {port} cannot be bound: {problem.strerror or problem}"


def _open_unix(path: str) -> HttpListener:
    path = os.path.realpath(path)  # the same name from any working directory
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError as problem:
        sock.close()
        if problem.errno != errno.EADDRINUSE or not _is_stale(path):
            raise UsageError(f"--uds {path} cannot be bound: {problem.strerror or problem}") from problem
        os.unlink(path)
        return _open_unix(path)
    return HttpListener(sock, path, 0)


def _is_stale(path: str) -> bool:
    """Return whether a killed server has left this socket file: no process listens on it or has bound it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return path not in _bound_paths()
        except OSError:
            return False
    return False


def _bound_paths() -> set[str]:
    """Return the paths of this network namespace's bound Unix sockets, without accepted connections."""
    with open("/proc/net/unix", errors="surrogateescape") as table:
        rows = [line.rstrip("\n").split(None, 7) for line in table]
    return {row[7] for row in rows if len(row) == 8 and row[5] == _UNCONNECTED}
