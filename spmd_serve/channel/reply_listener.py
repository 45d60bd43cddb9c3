"""The driver's listener for the connections over which ranks on other nodes reply.

Anybody who reaches the port may connect. Whatever a pending connection sends, and whatever that raises,
closes this connection only.
"""

import json
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from spmd_serve.channel.base import Deadline, Say
from spmd_serve.channel.reply import CHALLENGE_BYTES, FrameSocket, ReplyInbox, prepare, seals
from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.rendezvous.store import Wait
from spmd_serve.wire.frames import DEFAULT_MAX_BYTES, FrameReader, FrameWriter, Kind

_HELLO_MAX_BYTES = 4096
_HELLO_S = 10.0
"""A pending connection that has not authenticated after so many seconds is closed."""
_MAX_PENDING = 64
_MAX_REPORTS = 64


class _PendingConnection:
    """A connection that has not authenticated yet."""

    def __init__(self, sock: socket.socket, peer: str, key: bytes | None, nonce: str, max_bytes: int) -> None:
        sock.setblocking(True)
        prepare(sock)
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        sock.sendall(challenge)
        up, down = seals(key, nonce, challenge)
        reader, writer = FrameReader(up, peer, _HELLO_MAX_BYTES), FrameWriter(down, max_bytes)
        self.frames = FrameSocket(sock, peer, reader, writer)
        self.until = time.monotonic() + _HELLO_S
        self._nonce = nonce

    def rank(self) -> int:
        """Return the rank in its HELLO. Raises TimeoutError while that is incomplete."""
        header, hello = self.frames.receive(Deadline(0.0))
        said = json.loads(bytes(hello))
        rank, nonce = said["rank"], said["nonce"]
        if header.kind is not Kind.HELLO or type(rank) is not int or type(nonce) is not str:
            raise self.frames.reader.bad("not a hello", header.seq)
        if nonce != self._nonce:
            raise self.frames.reader.bad(f"it is of run {nonce[:40]!r}, this is {self._nonce!r}", header.seq)
        return rank

    def admit(self, who: str, max_bytes: int) -> ReplyInbox:
        """Send WELCOME; from now on errors call the peer `who`."""
        self.frames.who = self.frames.reader.peer = who
        self.frames.reader.max_bytes = max_bytes
        with suppress(PeerLost):  # the first dequeue raises it
            self.frames.send(Kind.WELCOME, [])
        return ReplyInbox(self.frames)


class ReplyListener:
    """Listens at the address that other nodes reach, on a port that the kernel chooses.

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
        self._pending: list[_PendingConnection] = []
        self._reports = 0
        self._accept_failed = False

    def accept(self, ranks: Mapping[int, str], timeout_s: float, say: Say) -> dict[int, ReplyInbox]:
        """Wait until all `ranks` (rank -> its name in errors) are connected, then stop listening.

        `say` gets a line for each closed pending connection (the first 64), and after 3 s, then every 10 s,
        one that names the missing ranks. Raises PeerLost, which names them, after `timeout_s` seconds.
        """
        wait = Wait(say, time.monotonic() + timeout_s)
        inboxes: dict[int, ReplyInbox] = {}
        try:
            while len(inboxes) < len(ranks):
                missing = ", ".join(who for rank, who in ranks.items() if rank not in inboxes)
                if wait.left <= 0:
                    raise PeerLost(f"not connected to the driver within {timeout_s:g} s: {missing}")
                progress = self._accept_one(say)
                for pending in list(self._pending):
                    if (rank := self._try_hello(pending, ranks.keys() - inboxes.keys(), say)) is not None:
                        self._pending.remove(pending)
                        inboxes[rank] = pending.admit(ranks[rank], self._max_bytes)
                        progress = True
                if not progress:
                    wait.pause(lambda missing=missing: f"the connections of {missing} to the driver")  # type: ignore[misc]
        except BaseException:
            for inbox in inboxes.values():
                inbox.shutdown()
            raise
        finally:
            for pending in self._pending:
                pending.frames.close()
            self.close()
        return inboxes

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _accept_one(self, say: Say) -> bool:
        """Accept one connection; return whether there was one."""
        try:
            sock, peer = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as problem:
            # The connection stays in the backlog: the caller pauses before the next try.
            if not self._accept_failed:
                self._accept_failed = True
                say(f"cannot accept a connection to the driver, trying again: {problem}")
            return False
        name = f"{peer[0]}:{peer[1]}"
        try:
            pending = _PendingConnection(sock, name, self._key, self._nonce, self._max_bytes)
        except Exception as problem:
            sock.close()
            self._report(say, f"dropped a connection from {name} to the driver: {problem!r}")
            return True
        self._pending.append(pending)
        if len(self._pending) > _MAX_PENDING:
            self._drop(self._pending[0], f"more than {_MAX_PENDING} have not authenticated", say)
        return True

    def _try_hello(self, pending: _PendingConnection, expected: set[int], say: Say) -> int | None:
        """Return the rank of a pending connection that has authenticated; close one that cannot."""
        try:
            rank = pending.rank()
        except TimeoutError:
            if time.monotonic() >= pending.until:
                self._drop(pending, f"it did not authenticate within {_HELLO_S:g} s", say)
            return None
        except SpmdError as problem:
            self._drop(pending, str(problem), say)
            return None
        except Exception as problem:
            self._drop(pending, f"not a hello: {problem!r:.100}", say)
            return None
        if rank not in expected:
            self._drop(pending, f"rank {rank} is not expected, or has connected already", say)
            return None
        return rank

    def _drop(self, pending: _PendingConnection, reason: str, say: Say) -> None:
        self._pending.remove(pending)
        pending.frames.close()
        self._report(say, f"dropped a connection from {pending.frames.who} to the driver: {reason}")

    def _report(self, say: Say, text: str) -> None:
        self._reports += 1
        if self._reports <= _MAX_REPORTS:
            say(text)
