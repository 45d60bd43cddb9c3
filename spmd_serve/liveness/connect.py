"""Registration: how a process becomes a member of its node's watcher."""

import contextlib
import os
import socket
import struct
import time
from typing import NamedTuple

from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.liveness.status import socket_name
from spmd_serve.liveness.status_table import StatusEntry
from spmd_serve.wire.lines import BadLine, LineBuffer, Message, pack, unpack

_RETRY_INTERVAL_S = 0.05


class Registration(NamedTuple):
    """What the watcher gives to a new member; `lines` holds the data received after the welcome."""

    sock: socket.socket
    entry: StatusEntry
    lines: LineBuffer
    watcher_pid: int
    hostname: str
    rank_timeout: float
    grace_s: float


def register(address: str, hello: Message, deadline_s: float) -> Registration:
    """Try until the watcher at `address` accepts this process.

    Raises:
        PeerLost: no watcher has accepted it within `deadline_s` seconds.
        SpmdError: a process of another user listens at the address.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        # A watcher of the round before closes the connection: it accepts no new members.
        with contextlib.suppress(OSError, BadLine), contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            sock.settimeout(max(deadline - time.monotonic(), _RETRY_INTERVAL_S))
            registration = _register(sock, address, hello)
            sock.settimeout(None)
            undo.pop_all()
            return registration
        if time.monotonic() > deadline:
            raise PeerLost(
                f"no watcher on this node at {address} within {deadline_s:g} s: "
                "local rank 0, which starts it, has not started or has failed; see its log"
            )
        time.sleep(_RETRY_INTERVAL_S)


def _register(sock: socket.socket, address: str, hello: Message) -> Registration:
    """Raises OSError or BadLine if no watcher listens, or if it does not accept new members."""
    sock.connect(socket_name(address))
    _, owner, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if owner != os.geteuid():
        raise SpmdError(f"the watcher's address {address} is in use by a process of user {owner}")
    sock.sendall(pack(hello))
    # The welcome arrives in one piece with the descriptor of the status table; later lines may follow.
    data, descriptors, _, _ = socket.recv_fds(sock, 65536, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        first, newline, following = data.partition(b"\n")
        if not newline or not descriptors:
            raise BadLine("no welcome")
        welcome, lines = unpack(first), LineBuffer()
        lines.feed(following)
        return Registration(
            sock=sock,
            entry=StatusEntry(descriptors[0], int(welcome["entry"])),
            lines=lines,
            watcher_pid=int(welcome["pid"]),
            hostname=str(welcome["hostname"]),
            rank_timeout=float(welcome["rank_timeout"]),
            grace_s=float(welcome["grace_s"]),
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
