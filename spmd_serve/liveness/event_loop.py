"""The watcher's event loop: descriptors with callbacks, and non-blocking connections that carry lines."""

import contextlib
import os
import select
import selectors
import socket
from collections.abc import Callable

from spmd_serve.wire.lines import MAX_LINE, BadLine, LineBuffer

_BACKLOG_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
_LAST_READS = 64


def log(text: str) -> None:
    """One line to stderr, dropped rather than waited for when nobody reads: the watcher must never block."""
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    if poller.poll(0):
        line = f"spmd_serve watcher: {text}\n".encode(errors="replace")
        with contextlib.suppress(OSError):
            os.write(2, line[: select.PIPE_BUF])


class Loop:
    """Waits for descriptors; sockets are served before pidfds, so that last words come before the death."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, callback: Callable[[int], None], events: int = selectors.EVENT_READ) -> None:
        """Call `callback(events)` whenever `fd` is ready."""
        self._selector.register(fd, events, (0, callback))

    def watch_end(self, pidfd: int, callback: Callable[[int], None]) -> None:
        """The same for a pidfd: after all sockets of the same turn."""
        self._selector.register(pidfd, selectors.EVENT_READ, (1, callback))

    def change(self, fd: int, callback: Callable[[int], None], events: int) -> None:
        """Other events for a descriptor that is watched."""
        self._selector.modify(fd, events, (0, callback))

    def forget(self, fd: int) -> None:
        """Before the descriptor is closed."""
        self._selector.unregister(fd)

    def wait(self, timeout_s: float) -> list[Callable[[], None]]:
        """Wait for events; what is to be called for them, in order."""
        ready = sorted(self._selector.select(timeout_s), key=lambda item: item[0].data[0])
        return [self._call(key, events) for key, events in ready]

    def _call(self, key: selectors.SelectorKey, events: int) -> Callable[[], None]:
        def call() -> None:
            # An earlier callback of this turn may have closed it.
            if self._selector.get_map().get(key.fd) is key:
                key.data[1](events)

        return call


class Conn:
    """One connected stream socket in the loop: lines come out of it, bytes go in, nothing blocks."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_line: Callable[[bytes], None],
        on_close: Callable[[str], None],
        longest: int = MAX_LINE,
    ) -> None:
        """`on_close(reason)` is called once: at the other side's end, on an error, or for garbage.

        A BadLine that `on_line` raises closes the connection too.
        """
        sock.setblocking(False)
        self.sock = sock
        self._loop = loop
        self._on_line = on_line
        self._on_close = on_close
        self._lines = LineBuffer(longest)
        self._out = b""
        self._open = True
        loop.watch(sock.fileno(), self._ready)

    @property
    def is_open(self) -> bool:
        """Whether it can still be used."""
        return self._open

    def trust(self) -> None:
        """Take lines of full length from now on."""
        self._lines.longest = MAX_LINE

    @property
    def is_clogged(self) -> bool:
        """Whether the other side does not read what was sent."""
        return bool(self._out)

    def send(self, data: bytes) -> None:
        """Send, or keep for later as far as a full MiB is not kept already."""
        if not self._open or len(self._out) > _BACKLOG_BYTES:
            return
        self._out += data
        self._flush()

    def read_now(self) -> None:
        """Take what has arrived already: the last words of a process that is gone."""
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
        if events & selectors.EVENT_READ:
            self._read()
        if self._open and events & selectors.EVENT_WRITE:
            self._flush()

    def _read(self) -> bool:
        """One piece, so that nobody can keep the loop busy; False when there was none."""
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
                if self._open:
                    self._on_line(line)
        except BadLine as problem:
            self._lost(str(problem))
        return True

    def _flush(self) -> None:
        try:
            sent = self.sock.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The reading side tells of it, after what has arrived before.
            sent = len(self._out)
        self._out = self._out[sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._loop.change(self.sock.fileno(), self._ready, events)

    def _lost(self, reason: str) -> None:
        self.close()
        self._on_close(reason)
