"""The watcher's event loop, and its non-blocking connections that carry lines.

The loop is written by hand instead of with asyncio, because the watcher is forked by a rank before anything
large is imported and must stay small: asyncio adds imports and memory to every node, and the order in which
the loop serves sockets and pidfds matters here (see `Loop.wait`).

An exception that a connection's handler raises never leaves that connection: the connection is closed with
the reason, and everything else goes on.
"""

import contextlib
import errno
import os
import select
import selectors
import socket
from collections.abc import Callable

from spmd_serve.wire.lines import MAX_LINE, BadLine, LineBuffer

_BACKLOG_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
_LAST_READS = 64
_SHORT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def log(text: str) -> None:
    """Write one line to stderr; drop it if the pipe is full, because the watcher must never block."""
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    if poller.poll(0):
        line = f"spmd_serve watcher: {text}\n".encode(errors="replace")
        with contextlib.suppress(OSError):
            os.write(2, line[: select.PIPE_BUF])


class Loop:
    """Wait for file descriptors and return the callbacks to run."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, callback: Callable[[int], None], events: int = selectors.EVENT_READ) -> None:
        """Call `callback(events)` whenever `fd` is ready."""
        self._selector.register(fd, events, (0, callback))

    def watch_end(self, pidfd: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` after all sockets of the turn in which the process of `pidfd` has ended."""
        self._selector.register(pidfd, selectors.EVENT_READ, (1, callback))

    def change(self, fd: int, callback: Callable[[int], None], events: int) -> None:
        """Replace callback and events of a watched descriptor."""
        self._selector.modify(fd, events, (0, callback))

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor; call this before the descriptor is closed."""
        self._selector.unregister(fd)

    def wait(self, timeout_s: float) -> list[Callable[[], None]]:
        """Wait up to `timeout_s` seconds for events; return the callbacks to run, in order.

        Sockets come before pidfds, so that the final report of a process is read before its death is handled.
        """
        ready = sorted(self._selector.select(timeout_s), key=lambda item: item[0].data[0])
        return [self._call(key, events) for key, events in ready]

    def _call(self, key: selectors.SelectorKey, events: int) -> Callable[[], None]:
        def call() -> None:
            # An earlier callback of this turn may have closed the descriptor.
            if self._selector.get_map().get(key.fd) is key:
                key.data[1](events)

        return call


class Listener:
    """A listening socket in the loop, which accepts one connection per turn."""

    def __init__(self, loop: Loop, sock: socket.socket, on_accept: Callable[[socket.socket], None]) -> None:
        """Accept from `sock` from now on; an exception of `on_accept` closes the new connection only."""
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._on_accept = on_accept
        self._watched = self._open = True
        loop.watch(sock.fileno(), self._ready)

    def resume(self) -> None:
        """Accept again after the process ran out of descriptors or memory; call this regularly."""
        if self._open and not self._watched:
            self._watched = True
            self._loop.watch(self._sock.fileno(), self._ready)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._open:
            if self._watched:
                self._loop.forget(self._sock.fileno())
            self._sock.close()
            self._open = False

    def _ready(self, _events: int) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as problem:
            if problem.errno in _SHORT_OF_RESOURCES:
                # The socket stays readable: without a pause the loop would do nothing else.
                self._loop.forget(self._sock.fileno())
                self._watched = False
            return
        try:
            self._on_accept(sock)
        except Exception as problem:
            log(f"dropped a new connection: {problem!r}")
            sock.close()


class Connection:
    """One connected stream socket in the loop: it delivers lines, sends bytes and never blocks."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_line: Callable[[bytes], None],
        on_close: Callable[[str], None],
        longest: int = MAX_LINE,
    ) -> None:
        """Start to read. A line has at most `longest` bytes.

        `on_close(reason)` is called once: when the peer closes, on an error, for a line that is too long, and
        when `on_line` raises.
        """
        sock.setblocking(False)
        self.sock = sock
        self._loop = loop
        self._on_line = on_line
        self._on_close = on_close
        self._lines = LineBuffer(longest)
        self._out = b""
        self._open = True
        self._is_last = False
        loop.watch(sock.fileno(), self._ready)

    @property
    def is_open(self) -> bool:
        """Whether the connection can still be used."""
        return self._open

    def trust(self) -> None:
        """Accept lines of full length from now on."""
        self._lines.longest = MAX_LINE

    @property
    def is_clogged(self) -> bool:
        """Whether the peer does not read what was sent."""
        return bool(self._out)

    def send(self, data: bytes) -> None:
        """Send `data`, or keep it until the peer reads; drop it if more than 1 MiB is waiting."""
        if not self._open or len(self._out) > _BACKLOG_BYTES:
            return
        self._out += data
        self._flush()

    def send_last(self, data: bytes) -> None:
        """Send `data`, read nothing more, and close the connection when everything is sent."""
        self._is_last = True
        self.send(data)

    def read_now(self) -> None:
        """Read what has arrived: the final reports of a process that has ended."""
        for _ in range(_LAST_READS):
            if not self._open or not self._read():
                return

    def close(self) -> None:
        """Close without calling `on_close`. Idempotent."""
        if self._open:
            self._open = False
            self._loop.forget(self.sock.fileno())
            self.sock.close()

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_READ and not self._is_last:
            self._read()
        if self._open and events & selectors.EVENT_WRITE:
            self._flush()

    def _read(self) -> bool:
        """Read one piece, so that no peer can occupy the loop; return False if there was none."""
        try:
            data = self.sock.recv(_PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError as problem:
            self._lost(problem.strerror or str(problem))
            return False
        if not data:
            self._lost("")
            return False
        try:
            self._lines.feed(data)
            for line in self._lines.take():
                if self._open and not self._is_last:
                    self._on_line(line)
        except BadLine as problem:
            self._lost(str(problem))
        except Exception as problem:
            self._lost(f"a bad message: {problem!r}")
        return True

    def _flush(self) -> None:
        try:
            sent = self.sock.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The reading side reports the error, after what has arrived before.
            sent = len(self._out)
        self._out = self._out[sent:]
        if self._is_last and not self._out:
            self.close()
            return
        reads = 0 if self._is_last else selectors.EVENT_READ
        self._loop.change(
            self.sock.fileno(), self._ready, reads | (selectors.EVENT_WRITE if self._out else 0)
        )

    def _lost(self, reason: str) -> None:
        self.close()
        self._on_close(reason)
