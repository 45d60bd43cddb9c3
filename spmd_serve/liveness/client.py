"""A member's connection to its node's watcher; works whatever the member's main thread does."""

import contextlib
import faulthandler
import itertools
import os
import queue
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.liveness.connect import Registration, register
from spmd_serve.liveness.protocol import STACKS_SIGNAL, End, Hello, RootCause, WatchConfig
from spmd_serve.liveness.root_cause import PauseTolerantClock
from spmd_serve.liveness.status_table import StatusEntry
from spmd_serve.system.log import say
from spmd_serve.system.process import open_pidfd, send_signal, wait_readable
from spmd_serve.wire.lines import BadLine, Message, pack, unpack

_POLL_INTERVAL_S = 1.0
_REQUEST_TIMEOUT_S = 10.0
_MAX_TEXT = 4000
"""Characters: one system call sends a line of this length whole, so sending needs no lock."""


def end_process(root_cause: RootCause) -> None:
    """Write the root cause to stderr and exit with code 1 without any clean-up (the default callback)."""
    say(f"spmd_serve: {root_cause.cause}")
    os._exit(1)


def keep_answering(root_cause: RootCause) -> None:
    """Do nothing: an API server answers its clients with errors until the watcher kills it."""


class WatcherLink:
    """A member's connection to its node's watcher, made by `connect`.

    Any thread may call the methods; signal handlers may call those that only send. A fork closes the link in
    the child: there the methods that only send do nothing, and the child connects for itself if needed.
    """

    entry: StatusEntry
    """The entry in which this member records its progress."""
    watcher_pid: int

    def __init__(
        self,
        registration: Registration,
        on_root_cause: Callable[[RootCause], None],
        on_drain: Callable[[str], None] | None,
        on_end: Callable[[End], None] | None,
    ) -> None:
        self.entry = registration.entry
        self.watcher_pid = registration.watcher_pid
        self.root_cause: RootCause | None = None
        self.has_ended = False
        self.watcher_lost = False
        """Whether the root cause is the loss of the watcher: then no watcher is left to log it."""
        self._hostname = registration.hostname
        self._watcher = open_pidfd(registration.watcher_pid)
        self._sock = registration.sock
        self._lines = registration.lines
        self._on_root_cause, self._on_drain, self._on_end = on_root_cause, on_drain, on_end
        self._rank_timeout, self._grace_s = registration.rank_timeout, registration.grace_s
        self._left = False
        self._closed = threading.Event()
        self._ids = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[Message | None]] = {}
        self._thread = threading.Thread(target=self._run, name="watcher-link", daemon=True)
        _links.add(self)

    @classmethod
    def connect(
        cls,
        address: str,
        hello: Mapping[str, Any],
        deadline_s: float,
        on_root_cause: Callable[[RootCause], None] = end_process,
        on_drain: Callable[[str], None] | None = None,
        on_end: Callable[[End], None] | None = None,
        stacks: bool = True,
    ) -> "WatcherLink":
        """Register with the watcher at `address`, trying for `deadline_s` seconds.

        The link's thread calls the callbacks, each at most once.

        Args:
            address: what `watcher_address` returns.
            hello: kind (one of KINDS), name ("rank 3") and rank (int or None) of the new member.
            on_root_cause: called with the root cause when the job has failed. The watcher kills a process
                that is still there `grace_s` seconds later.
            on_drain: called with the reason, on ranks only, when the job is to drain.
            on_end: called when the normal end of all parts of the job has been announced.
            stacks: make SIGUSR2 write the stacks of all threads to stderr.

        Raises:
            PeerLost: no watcher has accepted this process in time.
        """
        message = {"t": "hello", "stacks": stacks, **asdict(Hello.of(hello))}
        if stacks:
            # A forked child inherits faulthandler's record of the handler, even if it has reset the signal.
            faulthandler.unregister(STACKS_SIGNAL)
            faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
        link = cls(register(address, message, deadline_s), on_root_cause, on_drain, on_end)
        link._thread.start()
        return link

    # Messages to the watcher.

    def identify(self, name: str, rank: int | None) -> None:
        """Send the name and the global rank that this member has after the rendezvous."""
        self._send({"t": "identify", "name": name, "rank": rank})

    def leaving(self) -> None:
        """Announce a normal end: from now on neither this process's exit nor its watcher's is a failure."""
        self._left = True
        self._send({"t": "leaving"})

    def failed(self, cause: str, *, peer: bool = False) -> None:
        """Report the error that ends this process, which may exit right after this call.

        `peer`: the error only says that another process is gone ("Connection closed by peer"), so reports by
        other members of errors of their own take precedence as the root cause.
        """
        self._send({"t": "failed", "cause": cause[:_MAX_TEXT], "peer": peer})

    def request_drain(self, reason: str) -> None:
        """Ask the whole job to drain; the `on_drain` of every rank is called, once."""
        self._send({"t": "drain", "reason": reason[:_MAX_TEXT]})

    def listen(self, address: str) -> int:
        """Have the watcher listen for the other nodes' watchers at this IP address; return the port.

        Only the head's listener is used later; `configure` closes the others. Raises SpmdError if the watcher
        cannot listen there.
        """
        return int(self._request({"t": "listen", "address": address})["port"])

    def open_probe(self, port: int) -> int:
        """Have the watcher answer probes at `port` (0: any free port); return the port.

        Raises SpmdError if the watcher cannot listen there.
        """
        return int(self._request({"t": "probe", "port": port})["port"])

    def serving(self, part: int, of: int) -> None:
        """Announce that endpoint `part` of `of` accepts requests."""
        self._send({"t": "serving", "part": part, "of": of})

    def configure(self, config: WatchConfig) -> None:
        """Send the job's nodes and limits; local rank 0 does this after the rendezvous. Raises SpmdError."""
        self._request({"t": "configure", "config": config.to_json()})

    def announce_end(self, end: End, timeout_s: float = 2.0) -> bool:
        """Announce the normal end of one part of the job; after that of all parts, exits are no failures.

        Return True once all parts have ended and all nodes know it, and False if this takes longer than
        `timeout_s` seconds.
        """
        try:
            self._request({"t": "end", **end.to_json()}, timeout_s)
        except SpmdError:
            return False
        return True

    def view(self, timeout_s: float) -> dict[str, Any]:
        """Return the watcher's view: of the whole job on the head, else of this node. Raises PeerLost."""
        view: dict[str, Any] = self._request({"t": "view"}, timeout_s)["view"]
        return view

    def close(self) -> None:
        """Leave and disconnect; the watcher still waits for this process's exit before its own."""
        self.leaving()
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(_REQUEST_TIMEOUT_S)
        self._disconnect()

    def _send(self, message: Message) -> bool:
        """Send a message; return False if the watcher is gone, which the link's thread reports."""
        try:
            # One call writes a short line in one piece. Without a lock, a signal handler that interrupts
            # this call can send too.
            self._sock.sendall(pack(message))
        except OSError:
            return False
        return True

    def _request(self, message: Message, timeout_s: float = _REQUEST_TIMEOUT_S) -> Message:
        """Send a message and return the reply. Raises PeerLost if none comes, SpmdError if it is an error."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the link cannot wait for a reply: its own thread receives it")
        number, replies = next(self._ids), queue.SimpleQueue[Message | None]()
        self._replies[number] = replies
        sent = self._send(message | {"id": number})
        try:
            reply = replies.get(timeout=timeout_s if sent else 0)
        except queue.Empty:
            reply = None
        finally:
            self._replies.pop(number, None)
        if reply is None:
            raise PeerLost(f"the watcher on node {self._hostname} has not answered ({message['t']})")
        if "error" in reply:
            raise SpmdError(str(reply["error"]))
        return reply

    # Messages from the watcher, handled by the link's thread.

    def _run(self) -> None:
        silent_s = self._receive()
        for replies in list(self._replies.values()):
            replies.put(None)
        if self._left or self.has_ended:
            return
        self.watcher_lost = True
        how = "is gone" if silent_s is None else f"has been silent for {silent_s:.0f} s"
        cause = f"the watcher on node {self._hostname} {how}"
        self._declare(RootCause(cause, None, self._hostname, time.time(), silent_s))
        # No watcher is left to kill this process if the callback does not end it.
        if not self._closed.wait(self._grace_s):
            os.kill(os.getpid(), signal.SIGKILL)

    def _receive(self) -> float | None:
        """Handle messages until the watcher is gone (None) or silent for too long (seconds of silence)."""
        clock = PauseTolerantClock(2 * _POLL_INTERVAL_S)
        received_at = clock.tick(time.monotonic())
        with contextlib.suppress(OSError, ValueError, KeyError, BadLine):
            while True:
                for line in self._lines.take():
                    self._on_message(unpack(line))
                interval_s = min(_POLL_INTERVAL_S, self._rank_timeout / 4)
                clock.most = 2 * interval_s
                ready = wait_readable(self._sock.fileno(), interval_s)
                now = clock.tick(time.monotonic())
                if ready:
                    received_at = now
                    data = self._sock.recv(65536)
                    if not data:
                        break
                    self._lines.feed(data)
                elif now - received_at > self._rank_timeout - interval_s:
                    if self._watcher is not None:
                        # A stopped watcher would stay for ever; all its members decide the same now.
                        send_signal(self._watcher, signal.SIGKILL)
                    return now - received_at
        return None

    def _on_message(self, message: Message) -> None:
        kind = message["t"]
        if kind == "reply":
            if replies := self._replies.get(int(message["id"])):
                replies.put(message)
        elif kind == "watch":
            self._hostname = str(message["hostname"])
            self._rank_timeout, self._grace_s = float(message["rank_timeout"]), float(message["grace_s"])
        elif kind == "root_cause":
            self._declare(RootCause.from_json(message["root_cause"]))
        elif kind == "drain" and self._on_drain is not None:
            self._call(self._on_drain, str(message["reason"]))
        elif kind == "end" and not self.has_ended:
            self.has_ended = True
            if self._on_end is not None:
                self._call(self._on_end, End.from_json(message))

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception:
            traceback.print_exc()

    def _declare(self, root_cause: RootCause) -> None:
        if self.root_cause is not None:
            return
        self.root_cause = root_cause
        try:
            self._on_root_cause(root_cause)
        except BaseException as problem:
            say(f"spmd_serve: on_root_cause failed: {problem!r}")
            end_process(root_cause)

    def _disconnect(self) -> None:
        self._sock.close()
        if self._watcher is not None:
            os.close(self._watcher)
            self._watcher = None

    def _detach(self) -> None:
        """Give up the link in a forked child; the parent keeps it."""
        self.entry.detach()
        self._left = True
        self._disconnect()


_links: "weakref.WeakSet[WatcherLink]" = weakref.WeakSet()


def _detach_all() -> None:
    for link in list(_links):
        link._detach()


os.register_at_fork(after_in_child=_detach_all)
