"""The ranks' answers to the driver, from other hosts: one TCP connection each, read in the thread that waits.

A connection begins with a challenge from the driver, a HELLO of the rank (rank and generation, signed) and a
WELCOME back, so that with a key set both know whom they talk to, and nothing can be replayed: the signatures
of a connection are bound to its challenge. The driver's door is in reply_listener.py.
In the other direction single bytes travel, the bell (see nccl.py).
"""

import json
import select
import socket
import threading
from contextlib import suppress
from typing import Any

from spmd_serve.channel.base import ChannelClosed, ChannelStopped, Deadline
from spmd_serve.errors import PeerLost
from spmd_serve.wire import codec
from spmd_serve.wire.frames import (
    DEFAULT_MAX_BYTES,
    HEADER,
    BadFrame,
    FrameReader,
    FrameWriter,
    Header,
    Kind,
    Seal,
)

CHALLENGE_BYTES = 16
_FIRST_PIECE_BYTES = 1 << 20
"""Memory for a frame is allocated as its bytes arrive: at first this much, then twice what has arrived."""


def prepare(sock: socket.socket) -> None:
    """Options of both ends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Only a backstop for a host that vanished while idle (20 s); liveness is watched elsewhere, and faster.
    # No TCP_USER_TIMEOUT: it would also end a connection whose reader is merely busy for long. The buffers'
    # sizes are left to the kernel, which grows them to 4 MiB and more; setting them would cap them lower.
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class FrameSocket:
    """Frames over one TCP connection. Partly received frames survive a timeout."""

    def __init__(self, sock: socket.socket, who: str, reader: FrameReader, writer: FrameWriter) -> None:
        self.sock, self.who, self.reader, self.writer = sock, who, reader, writer
        self.closing = False
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._header: Header | None = None
        self._buffer = bytearray()
        self._have = 0

    def send(self, kind: Kind, parts: list[Any]) -> None:
        """Send one frame; waits while the peer does not read. PeerLost, ChannelClosed."""
        with self._lock:
            head = self.writer.frame(kind, parts)
            try:
                if sum(map(len, parts)) < 1 << 16:
                    self.sock.sendall(b"".join((head, *parts)))
                else:
                    for part in (head, *parts):
                        self.sock.sendall(part)
            except OSError as error:
                raise self.lost(str(error)) from error

    def receive(self, deadline: Deadline) -> tuple[Header, memoryview]:
        """Return the next frame, whose signature is checked. Raises TimeoutError, PeerLost or BadFrame.

        The memory it takes is bounded by twice what the peer has sent, not by the length it announces.
        """
        if self._header is None:
            self._header = self.reader.header(self._fill(HEADER.size, deadline))
        header, mac_bytes = self._header, self.reader.seal.size
        rest = memoryview(self._fill(mac_bytes + header.length, deadline))
        self._header = None
        self.reader.verify(header, rest[:mac_bytes], rest[mac_bytes:])
        return header, rest[mac_bytes:]

    def recv_into(self, target: memoryview, deadline: Deadline) -> int:
        """At least one byte, and how many."""
        while True:
            if self.closing:
                raise ChannelClosed(f"the connection to {self.who} is closed")
            try:
                got = self.sock.recv_into(target, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not self._poll.poll(1000 * deadline.left()) and deadline.over():
                    raise TimeoutError(f"no answer from {self.who} in time") from None
                continue
            except OSError as error:
                raise self.lost(str(error)) from error
            if not got:
                raise self.lost("it closed the connection")
            return got

    def goodbye(self) -> None:
        """Send STOP if that needs no waiting."""
        if self.closing or not self._lock.acquire(blocking=False):
            return
        try:
            with suppress(OSError):
                self.sock.send(self.writer.frame(Kind.STOP), socket.MSG_DONTWAIT)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Wake whoever waits here, and close."""
        self.closing = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def lost(self, cause: str) -> PeerLost | ChannelClosed:
        """The error for an end of the connection: ours or theirs."""
        if self.closing:
            return ChannelClosed(f"the connection to {self.who} is closed")
        return PeerLost(f"lost {self.who}: {cause}")

    def _fill(self, size: int, deadline: Deadline) -> bytearray:
        """Return the next `size` bytes; what came before a TimeoutError is kept for the next call."""
        while self._have < size:
            if self._have == len(self._buffer):
                most = min(size, max(_FIRST_PIECE_BYTES, 2 * self._have))
                self._buffer += bytes(most - self._have)
            with memoryview(self._buffer) as whole, whole[self._have :] as free:
                self._have += self.recv_into(free, deadline)
        full, self._buffer, self._have = self._buffer, bytearray(), 0
        return full


def seals(key: bytes | None, nonce: str, challenge: bytes) -> tuple[Seal, Seal]:
    """Of the answers and of what goes back."""
    bound = f"{nonce}/{challenge.hex()}"
    return Seal(key, bound, "reply"), Seal(key, bound, "doorbell")


class ReplyInbox:
    """The driver's end of one rank's answers. One thread reads; any may call shutdown()."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames

    def wait_until_ready(self) -> None:
        """Nothing to wait for: it exists only once the rank is connected."""

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> object:
        """The rank's next answer. TimeoutError loses nothing; PeerLost names the rank and its host."""
        header, payload = self._frames.receive(Deadline(None if indefinite else timeout))
        if header.kind is Kind.STOP:
            raise ChannelStopped(f"{self._frames.who} has left")
        if header.kind is not Kind.MESSAGE:
            raise self._frames.reader.bad(f"{header.kind.name} has no place here", header.seq)
        return codec.decode(payload)

    def ring(self, kind: Kind) -> None:
        """Ring the rank's bell: it should post a receive (MESSAGE), or simply know (HEARTBEAT, STOP)."""
        try:
            self._frames.sock.sendall(bytes([kind]))
        except OSError as error:
            raise self._frames.lost(str(error)) from error

    def shutdown(self) -> None:
        """Wake a waiting dequeue and close the connection."""
        self._frames.close()


class ReplySender:
    """A rank's end: connects when made. `enqueue` from any thread; `doorbell` from one."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        nonce: str,
        *,
        key: bytes | None = None,
        driver: str = "the driver",
        timeout_s: float = 60.0,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """Raises PeerLost when the driver is not there within `timeout_s`, or does not take this rank."""
        try:
            sock = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise PeerLost(f"rank {rank} cannot reach {driver} at {host}:{port}: {error}") from error
        try:
            prepare(sock)
            challenge = b""
            while len(challenge) < CHALLENGE_BYTES and (more := sock.recv(CHALLENGE_BYTES - len(challenge))):
                challenge += more
            up, down = seals(key, nonce, challenge)
            reader, writer = FrameReader(down, driver), FrameWriter(up, max_bytes)
            self._frames = FrameSocket(sock, driver, reader, writer)
            self._frames.send(Kind.HELLO, [json.dumps({"rank": rank, "nonce": nonce}).encode()])
            header, _ = self._frames.receive(Deadline(timeout_s))
            if header.kind is not Kind.WELCOME:
                raise reader.bad(f"{header.kind.name} instead of a welcome", header.seq)
            sock.settimeout(None)
        except (PeerLost, OSError) as error:
            sock.close()
            raise PeerLost(
                f"{driver} at {host}:{port} did not take rank {rank}: is the control key the same on every"
                f" host, and does rank {rank} belong to this run? ({error})"
            ) from error
        except BaseException:
            sock.close()
            raise

    def wait_until_ready(self) -> None:
        """Nothing to wait for: the driver has welcomed this rank."""

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send an answer; waits while the driver does not read, without regard to `timeout`.

        Raises PeerLost when the driver is gone, ChannelClosed after shutdown(), RefusedClass.
        """
        self._frames.send(Kind.MESSAGE, codec.encode_parts(obj))

    def doorbell(self, timeout: float) -> Kind | None:
        """The next ring of the driver, None after `timeout` seconds."""
        one = bytearray(1)
        try:
            self._frames.recv_into(memoryview(one), Deadline(timeout))
        except TimeoutError:
            return None
        if one[0] not in (Kind.MESSAGE, Kind.HEARTBEAT, Kind.STOP):
            raise BadFrame(f"unknown ring {one[0]} from {self._frames.who}")
        return Kind(one[0])

    def shutdown(self) -> None:
        """Say goodbye if that needs no waiting, and close."""
        self._frames.goodbye()
        self._frames.close()
