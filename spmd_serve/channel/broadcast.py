"""The driver's messages to the other hosts, by broadcast over a process group of our own.

A gloo send is a rendezvous with a posted receive, so members post `depth` receives of one fixed size ahead,
and gloo's threads take what comes while the rank computes. What does not fit into a frame is announced by
one, and follows in a single broadcast of its exact size on a second lane. How bytes travel is the Lane's
business (gloo.py, nccl.py); order, numbering, signatures and closing are the same for all.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from spmd_serve.channel.base import (
    ChannelClosed,
    ChannelSpec,
    ChannelStopped,
    Deadline,
    Doorbell,
    PeerSilent,
    Transport,
    join,
)
from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.wire import codec
from spmd_serve.wire.frames import Buffer, FrameReader, FrameWriter, Header, Kind, Seal

SEND_TIMEOUT_S = 300.0


class BroadcastOutbox:
    """The sending member. Thread-safe. Up to `depth` frames are under way before a send waits for anybody."""

    def __init__(
        self,
        frames: Transport,
        bodies: Transport,
        spec: ChannelSpec,
        *,
        timeout_s: float = SEND_TIMEOUT_S,
        drain: bool = True,
    ) -> None:
        """`timeout_s`: how long a send waits for slow members.

        `drain`: members post receives ahead, so that a STOP has to fill them all.
        """
        self._frames, self._bodies, self._spec = frames, bodies, spec
        self._timeout_s = timeout_s
        self._stops = spec.depth if drain else 0
        self.writer = FrameWriter(Seal(spec.key, spec.round_id, spec.name), spec.max_bytes)
        self._room = spec.frame_bytes - self.writer.overhead
        self._under_way: deque[tuple[Any, Any]] = deque()  # (frame, body or None), oldest first
        self._free: list[Any] = []
        self._lock = threading.Lock()
        self._owner = 0
        self._closing = threading.Event()
        self._closed = False

    def wait_until_ready(self) -> None:
        """Nothing to wait for: the group exists only once all members have joined."""

    def enqueue(self, obj: object, timeout: float | None = None) -> int:
        """Send `obj` to all members; returns its bytes, counted once.

        Returns when the broadcast is under way. RefusedClass and MessageTooLong leave the channel as it was;
        PeerSilent after `timeout` seconds of `depth` frames not taken; PeerLost when a member is gone.
        """
        parts = codec.encode_parts(obj)
        self._send(Kind.MESSAGE, parts, timeout)
        return sum(map(len, parts))

    def enqueue_encoded(self, payload: Buffer, timeout: float | None = None) -> None:
        """Send what codec.encode has made already."""
        self._send(Kind.MESSAGE, [payload], timeout)

    def heartbeat(self) -> bool:
        """Send a sign of life unless something is under way already; never waits. Whether one was sent."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._closing.is_set() or self._pending():
                return False
            self._start(Kind.HEARTBEAT, ())
            return True
        finally:
            self._lock.release()

    def flush(self, timeout: float) -> bool:
        """Wait until the members have all that was sent; False after `timeout` seconds. PeerLost."""
        deadline = Deadline(timeout)
        with self._lock:
            while self._pending():
                if deadline.over():
                    return False
                self._wait_for_oldest(deadline)
        return True

    def shutdown(self, timeout: float = 2.0) -> None:
        """Tell the members that this was all, and close; waits at most `timeout` seconds for slow ones.

        From a signal handler that interrupted a send it only makes that send raise; call it again then.
        """
        self._closing.set()
        interrupted = self._owner == threading.get_ident()
        if self._closed or interrupted or not self._lock.acquire(timeout=timeout):
            return
        try:
            self._closed = True
            deadline = Deadline(timeout)
            with suppress(SpmdError):  # whoever is gone needs no goodbye
                self._pending()
                for _ in range(self._stops):
                    self._start(Kind.STOP, ())
                while self._pending() and not deadline.over():
                    self._wait_for_oldest(deadline)
            frames = [frame for frame, _ in self._under_way]
            self._frames.close(frames)
            self._bodies.close([body for _, body in self._under_way if body is not None])
        finally:
            self._lock.release()

    def _send(self, kind: Kind, parts: Sequence[Buffer], timeout: float | None) -> None:
        seconds = self._timeout_s if timeout is None else timeout
        deadline = Deadline(seconds)
        if not self._lock.acquire(timeout=seconds):
            raise self._silent(seconds)
        self._owner = threading.get_ident()
        try:
            # without a look at older frames first where there is room: the message goes out sooner
            while len(self._under_way) >= self._spec.depth and self._pending() >= self._spec.depth:
                if self._closing.is_set():
                    break
                if deadline.over():
                    raise self._silent(seconds)
                self._wait_for_oldest(deadline)
            if self._closing.is_set():
                raise ChannelClosed(f"{self._spec.name} is closed")
            self._start(kind, parts)
            self._pending()
        finally:
            self._owner = 0
            self._lock.release()

    def _start(self, kind: Kind, parts: Sequence[Buffer]) -> None:
        body = None
        if sum(map(len, parts)) <= self._room:
            pieces: list[Buffer] = [self.writer.frame(kind, parts), *parts]
        else:
            body = self._bodies.slot(join(list(parts)))
            pieces = [self.writer.announcement(body.memory)]
        frame = self._free.pop() if self._free else self._frames.slot(bytearray(self._spec.frame_bytes))
        at = 0
        for piece in pieces:
            frame.view[at : at + len(piece)] = piece
            at += len(piece)
        self._frames.start(frame)
        if body is not None:
            self._bodies.start(body)
        self._under_way.append((frame, body))

    def _pending(self) -> int:
        """How many frames are under way; a failed one raises, even when an older one hangs."""
        finished = [
            self._frames.done(frame) and (body is None or self._bodies.done(body))
            for frame, body in self._under_way
        ]
        while finished and finished.pop(0):
            self._free.append(self._under_way.popleft()[0])
        return len(self._under_way)

    def _wait_for_oldest(self, deadline: Deadline) -> None:
        frame, body = self._under_way[0]
        if self._frames.wait(frame, deadline.left()) and body is not None:
            self._bodies.wait(body, deadline.left())

    def _silent(self, seconds: float) -> PeerSilent:
        members = ", ".join(self._spec.members[1:])
        return PeerSilent(
            f"{self._spec.name}: {len(self._under_way)} control frames were not taken for {seconds:g} s"
            f" by at least one of: {members}"
        )


class BroadcastInbox:
    """A receiving member. One thread receives; any may call shutdown()."""

    def __init__(
        self,
        frames: Transport,
        bodies: Transport,
        spec: ChannelSpec,
        *,
        on_heartbeat: Callable[[], None] | None = None,
        doorbell: Doorbell | None = None,
        spin_s: float = 0.0,
    ) -> None:
        """`on_heartbeat` is called in the receiving thread.

        With a `doorbell` nothing is posted ahead: one receive per ring. `spin_s`: for so long after a
        message, poll instead of sleeping.
        """
        self._frames, self._bodies, self._spec = frames, bodies, spec
        self._on_heartbeat = on_heartbeat
        self._doorbell = doorbell
        self._spin_s = spin_s
        self.reader = FrameReader(Seal(spec.key, spec.round_id, spec.name), spec.members[0], spec.max_bytes)
        self._posted: deque[Any] = deque()
        self._big: tuple[Header, bytes, Any] | None = None  # a body that is under way
        self._last = 0.0
        self._closing = False
        self._stopped = False
        self._closed = False
        if doorbell is None:
            for _ in range(spec.depth):
                self._post(frames.slot(bytearray(spec.frame_bytes)))

    def wait_until_ready(self) -> None:
        """Nothing to wait for: the group exists only once all members have joined."""

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> object:
        """The driver's next object; TimeoutError after `timeout` seconds.

        Raises ChannelStopped after the driver's end, ChannelClosed after shutdown(), PeerLost, and for what
        must not be taken BadFrame or RefusedClass.
        """
        return codec.decode(self.receive(None if indefinite else timeout))

    def receive(self, timeout: float | None = None) -> bytes | bytearray:
        """The next message, still encoded. A timeout loses nothing, also in the middle of a long message."""
        deadline = Deadline(timeout)
        while self._big is None:
            header, inline = self._frame(deadline)
            if header.kind is Kind.MESSAGE:
                return inline
            if header.kind is Kind.HEARTBEAT:
                if self._on_heartbeat is not None:
                    self._on_heartbeat()
            elif header.kind is Kind.STOP:
                self._stop()
            elif header.kind is Kind.BIG and header.length:
                body = self._bodies.slot(bytearray(header.length))
                self._bodies.start(body)
                self._big = header, inline, body
            else:
                raise self.reader.bad(f"{header.kind.name} has no place here", header.seq)
        header, mac, body = self._big
        self._wait(self._bodies, body, deadline)
        self._big = None
        self.reader.verify(header, mac, body.memory)
        memory: bytearray = body.memory
        return memory

    def shutdown(self) -> None:
        """Wake a waiting dequeue. Signal-safe."""
        self._closing = True
        if self._closed or not self._stopped:
            return  # receives are posted still: the lane stays open until the process ends
        self._closed = True
        deadline = Deadline(1.0)
        with suppress(SpmdError):
            for slot in self._posted:
                self._frames.wait(slot, deadline.left(1.0) or 0.001)
        self._frames.close(list(self._posted))
        self._bodies.close([])

    def _frame(self, deadline: Deadline) -> tuple[Header, bytes]:
        if self._stopped:
            self._stop()
        if not self._posted:
            self._await_doorbell(deadline)
        slot = self._posted[0]
        self._wait(self._frames, slot, deadline)
        self._posted.popleft()
        header, inline = self.reader.inline(slot.view)
        self._last = time.monotonic()
        if self._doorbell is None and header.kind is not Kind.STOP:
            self._post(slot)
        return header, inline

    def _await_doorbell(self, deadline: Deadline) -> None:
        assert self._doorbell is not None
        while (rung := self._doorbell.doorbell(deadline.left())) is not Kind.MESSAGE:
            if rung is Kind.STOP:
                self._stop()
            if rung is Kind.HEARTBEAT and self._on_heartbeat is not None:
                self._on_heartbeat()
            self._look_around(deadline)
        self._post(self._frames.slot(bytearray(self._spec.frame_bytes)))

    def _post(self, slot: Any) -> None:
        self._posted.append(slot)
        self._frames.start(slot)

    def _wait(self, transport: Transport, slot: Any, deadline: Deadline) -> None:
        if self._closing:
            raise ChannelClosed(f"{self._spec.name} is closed")
        try:
            if self._spin_s:
                until = self._last + self._spin_s
                while not transport.done(slot) and time.monotonic() < until:
                    os.sched_yield()
            while not transport.done(slot) and not transport.wait(slot, deadline.left()):
                self._look_around(deadline)
        except PeerLost as error:
            if self._closing:
                raise ChannelClosed(f"{self._spec.name} is closed") from error
            raise

    def _look_around(self, deadline: Deadline) -> None:
        if self._closing:
            raise ChannelClosed(f"{self._spec.name} is closed")
        if deadline.over():
            raise TimeoutError(f"{self._spec.name}: no message from {self._spec.members[0]} in time")

    def _stop(self) -> NoReturn:
        self._stopped = True
        raise ChannelStopped(f"{self._spec.members[0]} has ended {self._spec.name}")
