"""A member's line to its host's watcher: it is heard and hears the verdict, whatever its main thread does."""

import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.liveness.connect import Registration, register
from spmd_serve.liveness.protocol import STACKS_SIGNAL, End, Hello, RootCause, WatchConfig
from spmd_serve.liveness.root_cause import PauseTolerantClock
from spmd_serve.liveness.status_table import StatusEntry
from spmd_serve.system.log import say
from spmd_serve.system.process import open_pidfd, send_signal, wait_readable
from spmd_serve.wire.lines import BadLine, Message, pack, unpack

_SLICE_S = 1.0
_REQUEST_S = 10.0
_LONGEST_CAUSE = 4000
"""Characters: a line this short is sent by one call, whole, so that no lock is needed."""


def end_process(root_cause: RootCause) -> None:
    """The default answer to a verdict: one line to stderr, then exit code 1 without any clean-up."""
    say(f"spmd_serve: {root_cause.cause}")
    os._exit(1)


def keep_answering(root_cause: RootCause) -> None:
    """The answer of who serves clients: they get an error from the engine's end; the grace time ends us."""


class WatcherLink:
    """Made by `connect`. Any thread may call its methods, and signal handlers those that only send.

    In a forked child the link is closed and its methods that only send do nothing: a child makes its own.
    """

    entry: StatusEntry
    """Where this member notes its steps."""
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
        """The verdict is our own: there is no watcher that would print it."""
        self._host = registration.host
        self._watcher = open_pidfd(registration.watcher_pid)
        self._sock = registration.sock
        self._lines = registration.lines
        self._on_root_cause, self._on_drain, self._on_end = on_root_cause, on_drain, on_end
        self._rank_timeout, self._grace_s = registration.rank_timeout, registration.grace_s
        self._left = False
        self._closed = threading.Event()
        self._numbers = itertools.count(1)
        self._answers: dict[int, Message] = {}
        self._answered = threading.Condition()
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
        """Become a member; tries for `deadline_s` seconds, then raises PeerLost.

        hello: kind (one of KINDS), name ("rank 3"), rank (int or None).  on_verdict: called once,
        from the link's thread, with the job's first cause; a process that is still there `grace_s` later is
        killed. on_drain(reason): called once, on ranks only.  on_end(end): called when the job's
        normal end has been announced, for all its parts.  stacks: let SIGUSR2 write the stacks of
        all threads to stderr.
        """
        Hello.of(hello)
        if stacks:
            # A forked child inherits the belief that it is registered, even where it has reset the signal.
            faulthandler.unregister(STACKS_SIGNAL)
            faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
        said = {
            "t": "hello",
            "stacks": stacks,
            **{name: hello.get(name) for name in ("kind", "name", "rank")},
        }
        link = cls(register(address, said, deadline_s), on_root_cause, on_drain, on_end)
        link._thread.start()
        return link

    # What a member says.

    def identify(self, name: str, rank: int | None) -> None:
        """Its name and global rank, once the rendezvous has given them."""
        self._send({"t": "identify", "name": name, "rank": rank})

    def leaving(self) -> None:
        """Say this before a normal end: this process's death is then no failure, nor is its watcher's."""
        self._left = True
        self._send({"t": "leaving"})

    def failed(self, cause: str, *, peer: bool = False) -> None:
        """Report the error that is about to end this process, which may end right after this call.

        `peer`: the error says only that somebody else is gone ("Connection closed by peer"); then others'
        reports of their own errors count as the cause.
        """
        self._send({"t": "failed", "cause": cause[:_LONGEST_CAUSE], "peer": peer})

    def request_drain(self, reason: str) -> None:
        """Ask the job to finish what it does and end; each rank's `on_drain` is called, once."""
        self._send({"t": "drain", "reason": reason[:_LONGEST_CAUSE]})

    def listen(self, address: str) -> int:
        """Have the watcher listen for those of other hosts at this IP address; returns the port.

        Only the head's is used later; `configure` closes the others. Raises SpmdError when it can't.
        """
        return int(self._ask({"t": "listen", "address": address}, _REQUEST_S)["port"])

    def open_probe(self, port: int) -> int:
        """Have the watcher answer probes at this port (0: any free one); returns it. Raises SpmdError."""
        return int(self._ask({"t": "probe", "port": port}, _REQUEST_S)["port"])

    def serving(self, part: int, of: int) -> None:
        """Endpoint `part` of `of` takes requests from now on."""
        self._send({"t": "serving", "part": part, "of": of})

    def configure(self, config: WatchConfig) -> None:
        """By local rank 0 after the rendezvous: who belongs to the job, and its limits. Raises SpmdError."""
        self._ask({"t": "configure", "config": config.to_json()}, _REQUEST_S)

    def announce_end(self, end: End, timeout_s: float = 2.0) -> bool:
        """A part of the job ends normally; once all have, deaths are no failures any more.

        Returns when that is so and all hosts know (True), or after `timeout_s` seconds (False).
        """
        try:
            self._ask({"t": "end", **end.to_json()}, timeout_s)
        except SpmdError:
            return False
        return True

    def view(self, timeout_s: float) -> dict[str, Any]:
        """The job as the watcher sees it (the whole job on the head). Raises PeerLost."""
        view: dict[str, Any] = self._ask({"t": "view"}, timeout_s)["view"]
        return view

    def close(self) -> None:
        """Leave and let go of the watcher; it still waits for this process's end before it ends itself."""
        self.leaving()
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(_REQUEST_S)
        self._let_go()

    def _send(self, message: Message) -> bool:
        try:
            # One call for one short line puts it into the stream in one piece: no lock, so a signal handler
            # that interrupts this very call can send too.
            self._sock.sendall(pack(message))
        except OSError:
            return False  # the watcher is gone, which the thread tells
        return True

    def _ask(self, message: Message, timeout_s: float) -> Message:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a callback of the link can't wait for the watcher's answer: it would come through it"
            )
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        sent = self._send(message | {"id": number})
        with self._answered:
            while sent and number not in self._answers and self._thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._answered.wait(min(left, _SLICE_S))
            answer = self._answers.pop(number, None)
        if answer is None:
            raise PeerLost(f"the watcher on host {self._host} has not answered ({message['t']})")
        if "error" in answer:
            raise SpmdError(str(answer["error"]))
        return answer

    # What a member hears.

    def _run(self) -> None:
        clock = PauseTolerantClock(2 * _SLICE_S)
        heard = clock.tick(time.monotonic())
        try:
            while True:
                for line in self._lines.take():
                    self._hear(unpack(line))
                slice_s = min(_SLICE_S, self._rank_timeout / 4)
                clock.most = 2 * slice_s
                ready = wait_readable(self._sock.fileno(), slice_s)
                now = clock.tick(time.monotonic())
                if ready:
                    heard = now
                    data = self._sock.recv(65536)
                    if not data:
                        break
                    self._lines.feed(data)
                elif now - heard > self._rank_timeout - slice_s:
                    self._watcher_silent(now - heard)
                    return
        except (OSError, ValueError, KeyError, BadLine):
            pass
        finally:
            with self._answered:
                self._answered.notify_all()
        self._watcher_gone()

    def _hear(self, message: Message) -> None:
        kind = message["t"]
        if kind == "reply":
            with self._answered:
                self._answers[int(message["id"])] = message
                self._answered.notify_all()
        elif kind == "watch":
            self._host = str(message["host"])
            self._rank_timeout, self._grace_s = float(message["rank_timeout"]), float(message["grace_s"])
        elif kind == "root_cause":
            self._tell(RootCause.from_json(message["root_cause"]))
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

    def _watcher_silent(self, for_s: float) -> None:
        if self._watcher is not None:
            # A stopped watcher would stay for ever. All its members come to the same conclusion now.
            send_signal(self._watcher, signal.SIGKILL)
        self._watcher_lost(f"the watcher on host {self._host} has been silent for {for_s:.0f} s", for_s)

    def _watcher_gone(self) -> None:
        self._watcher_lost(f"the watcher on host {self._host} is gone", None)

    def _watcher_lost(self, cause: str, for_s: float | None) -> None:
        if self._left or self.has_ended:
            return
        self.watcher_lost = True
        self._tell(RootCause(cause, None, self._host, time.time(), for_s))
        # Nobody else is left who would do it.
        if not self._closed.wait(self._grace_s):
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, root_cause: RootCause) -> None:
        if self.root_cause is not None:
            return
        self.root_cause = root_cause
        try:
            self._on_root_cause(root_cause)
        except BaseException as problem:
            say(f"spmd_serve: on_verdict failed: {problem!r}")
            end_process(root_cause)

    def _let_go(self) -> None:
        self._sock.close()
        if self._watcher is not None:
            os.close(self._watcher)
            self._watcher = None

    def _forked(self) -> None:
        self.entry.detach()
        self._left = True
        self._let_go()


_links: "weakref.WeakSet[WatcherLink]" = weakref.WeakSet()


def _close_in_child() -> None:
    for link in list(_links):
        link._forked()


os.register_at_fork(after_in_child=_close_in_child)
