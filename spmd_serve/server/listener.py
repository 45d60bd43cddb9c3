"""The HTTP port: bound before any model is loaded, handed to the API server by fork."""

import errno
import os
import socket
from dataclasses import dataclass

from spmd_serve.errors import UsageError

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean all addresses, and where such a server can be reached on its own host."""

_UNCONNECTED = "01"
"""SS_UNCONNECTED in /proc/net/unix: bound, listening or not yet."""


@dataclass(frozen=True)
class Listener:
    """A bound (not yet listening) socket; `port` is 0 for a Unix socket."""

    sock: socket.socket
    family: socket.AddressFamily
    host: str
    port: int

    def answers(self) -> bool:
        """Whether somebody listens; callable after `sock` is closed here."""
        if self.family == socket.AF_UNIX:
            target: str | tuple[str, int] = self.host
        else:
            target = (_EVERYWHERE.get(self.host, self.host), self.port)
        with socket.socket(self.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(target) == 0

    def url_of(self, *, tls: bool, address: str | None = None) -> str:
        """The URL as vLLM and the start table show it; `address` stands for "all addresses" where given."""
        if self.family == socket.AF_UNIX:
            return f"unix:{self.host}"
        host = address if address is not None and self.host in _EVERYWHERE else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http{'s' if tls else ''}://{shown}:{self.port}"


def open_listener(host: str | None, port: int, uds: str | None) -> Listener:
    """Bind ``--host``/``--port`` (or ``--uds``) exclusively; nobody is let in before `about_to_listen`.

    Raises UsageError naming the flag when the address is taken or not ours.
    """
    if uds is not None:
        return _open_unix(uds)
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    # With SO_REUSEADDR a restart is not refused for connections in TIME_WAIT; without it afterwards,
    # nobody else can bind the port while we load (Linux lets two not yet listening sockets share one).
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host or "", port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as problem:
        sock.close()
        raise UsageError(_why_not(problem, host, port)) from problem
    return Listener(sock, family, host or "0.0.0.0", sock.getsockname()[1])


def about_to_listen(sock: socket.socket) -> None:
    """Let accepted connections inherit SO_REUSEADDR, or they would block a restart while in TIME_WAIT."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _why_not(problem: OSError, host: str | None, port: int) -> str:
    if problem.errno == errno.EADDRINUSE:
        return f"--port {port} is taken by another process on this host: stop it, or give another --port"
    if problem.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host {host} is not an address of this host: leave it out (all addresses) or name one of them"
        )
    if problem.errno == errno.EACCES:
        return f"--port {port} needs more rights than this user has: give a --port above 1023"
    return f"--host {host or '0.0.0.0'} --port {port} cannot be bound: {problem.strerror or problem}"


def _open_unix(path: str) -> Listener:
    path = os.path.realpath(path)  # by which other servers know it, wherever they were started
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError as problem:
        sock.close()
        if problem.errno != errno.EADDRINUSE or not _is_stale(path):
            raise UsageError(f"--uds {path} cannot be bound: {problem.strerror or problem}") from problem
        os.unlink(path)
        return _open_unix(path)
    return Listener(sock, socket.AF_UNIX, path, 0)


def _is_stale(path: str) -> bool:
    """A socket file left by a killed server: nobody listens on it, or has bound it by this path to do so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return path not in _bound_paths()
        except OSError:
            return False
    return False


def _bound_paths() -> set[str]:
    """Where this network namespace's Unix sockets are bound; connections of a listening one are left out."""
    with open("/proc/net/unix", errors="surrogateescape") as table:
        rows = [line.rstrip("\n").split(None, 7) for line in table]
    return {row[7] for row in rows if len(row) == 8 and row[5] == _UNCONNECTED}
