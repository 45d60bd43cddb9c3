"""The driver's door for the ranks' answers: who connects is checked, strangers are dropped."""

import json
import secrets
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from spmd_serve.channel.base import Deadline, Say
from spmd_serve.channel.reply import CHALLENGE_BYTES, FrameSocket, ReplyInbox, prepare, seals
from spmd_serve.errors import PeerLost
from spmd_serve.rendezvous.store import Wait
from spmd_serve.wire.frames import DEFAULT_MAX_BYTES, BadFrame, FrameReader, FrameWriter, Kind

_HELLO_MAX_BYTES = 4096
_HELLO_S = 10.0  # a stranger that says nothing is dropped after this


class _PendingConnection:
    """A connection whose HELLO is not complete yet."""

    def __init__(self, sock: socket.socket, peer: str, key: bytes | None, nonce: str, max_bytes: int) -> None:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        sock.sendall(challenge)
        up, down = seals(key, nonce, challenge)
        reader, writer = FrameReader(up, peer, _HELLO_MAX_BYTES), FrameWriter(down, max_bytes)
        self.frames = FrameSocket(sock, peer, reader, writer)
        self.until = time.monotonic() + _HELLO_S
        self._nonce = nonce

    def rank(self) -> int:
        """The rank that it says it is. TimeoutError while incomplete; BadFrame, PeerLost for a stranger."""
        header, hello = self.frames.receive(Deadline(0.0))
        try:
            said = json.loads(bytes(hello))
            rank, nonce = int(said["rank"]), str(said["nonce"])
        except (ValueError, KeyError, TypeError) as error:
            raise self.frames.reader.bad("not a hello", header.seq) from error
        if header.kind is not Kind.HELLO:
            raise self.frames.reader.bad("not a hello", header.seq)
        if nonce != self._nonce:
            raise self.frames.reader.bad(f"it is of run {nonce[:40]}, this is {self._nonce}", header.seq)
        return rank

    def admit(self, who: str, max_bytes: int) -> ReplyInbox:
        """Welcome it; from now on errors call it `who`."""
        self.frames.who = self.frames.reader.peer = who
        self.frames.reader.max_bytes = max_bytes
        with suppress(PeerLost):  # then its first dequeue says so
            self.frames.send(Kind.WELCOME, [])
        return ReplyInbox(self.frames)


class ReplyListener:
    """The driver's door, at the address that the other hosts reach, on a port that the kernel chose.

    Publish `host` and `port` to the ranks, then call `accept`.
    """

    def __init__(
        self, address: str, nonce: str, *, key: bytes | None = None, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        self._nonce, self._key, self._max_bytes = nonce, key, max_bytes
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.host = address
        self.port: int = self._listener.getsockname()[1]

    def accept(self, ranks: Mapping[int, str], timeout_s: float, say: Say) -> dict[int, ReplyInbox]:
        """Wait for all `ranks` (rank -> who it is, for errors), then shut the door.

        Strangers are dropped and told of by `say`, which also hears after 3 s, then every 10 s, who is
        missing. PeerLost names the missing after `timeout_s`.
        """
        wait = Wait(say, time.monotonic() + timeout_s)
        inside: dict[int, ReplyInbox] = {}
        pending: dict[int, _PendingConnection] = {}
        try:
            while len(inside) < len(ranks):
                missing = ", ".join(who for rank, who in ranks.items() if rank not in inside)
                if wait.left <= 0:
                    raise PeerLost(f"not connected to the driver within {timeout_s:g} s: {missing}")
                if not select.select([self._listener.fileno(), *pending], [], [], 0)[0]:
                    wait.pause(lambda missing=missing: f"the connections of {missing} to the driver")  # type: ignore[misc]
                self._greet(pending, say)
                for fd, pending_connection in list(pending.items()):
                    if (rank := self._ask(fd, pending, ranks, inside, say)) is not None:
                        del pending[fd]
                        inside[rank] = pending_connection.admit(ranks[rank], self._max_bytes)
        except BaseException:
            for inbox in inside.values():
                inbox.shutdown()
            raise
        finally:
            for pending_connection in pending.values():
                pending_connection.frames.close()
            self.close()
        return inside

    def close(self) -> None:
        """Shut the door."""
        self._listener.close()

    def _greet(self, pending: dict[int, _PendingConnection], say: Say) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                say(f"a connection to the driver went away at once: {error}")
                return
            sock.setblocking(True)
            try:
                prepare(sock)
                pending_connection = _PendingConnection(
                    sock, f"{peer[0]}:{peer[1]}", self._key, self._nonce, self._max_bytes
                )
            except OSError:
                sock.close()
                continue
            pending[sock.fileno()] = pending_connection

    @staticmethod
    def _ask(
        fd: int,
        pending: dict[int, _PendingConnection],
        ranks: Mapping[int, str],
        inside: Mapping[int, ReplyInbox],
        say: Say,
    ) -> int | None:
        pending_connection = pending[fd]
        peer = pending_connection.frames.who
        try:
            rank = pending_connection.rank()
        except TimeoutError:
            if time.monotonic() < pending_connection.until:
                return None
            why = f"it said nothing for {_HELLO_S:g} s"
        except (BadFrame, PeerLost) as error:
            why = str(error)
        else:
            if rank in ranks and rank not in inside:
                return rank
            why = f"rank {rank} is not awaited"
        del pending[fd]
        pending_connection.frames.close()
        say(f"dropped a connection from {peer} to the driver: {why}")
        return None
