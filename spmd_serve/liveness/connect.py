"""How a process becomes a member: it finds its host's watcher, says hello, and gets a slot on the board."""

import os
import socket
import struct
import time
from typing import NamedTuple

from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.liveness.status import socket_name
from spmd_serve.liveness.status_table import StatusEntry
from spmd_serve.wire.lines import BadLine, LineBuffer, Message, pack, unpack

_AGAIN_S = 0.05


class Registration(NamedTuple):
    """What a member was given; `lines` holds what the watcher has said behind its welcome."""

    sock: socket.socket
    entry: StatusEntry
    lines: LineBuffer
    watcher_pid: int
    host: str
    rank_timeout: float
    grace_s: float


def register(address: str, hello: Message, deadline_s: float) -> Registration:
    """Try until the watcher at `address` welcomes us. Raises PeerLost after `deadline_s` seconds."""
    deadline = time.monotonic() + deadline_s
    while True:
        registration = _try(address, pack(hello), deadline)
        if registration is not None:
            return registration
        if time.monotonic() > deadline:
            raise PeerLost(
                f"no watcher on this host at {address} within {deadline_s:g} s: "
                "local rank 0, which starts it, has not started or has failed; see its log"
            )
        time.sleep(_AGAIN_S)


def _try(address: str, hello: bytes, deadline: float) -> Registration | None:
    """None when there is no watcher (yet), or it takes nobody in: it is the one of the round before."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(max(deadline - time.monotonic(), _AGAIN_S))
        sock.connect(socket_name(address))
        _, owner, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if owner != os.geteuid():
            raise SpmdError(f"the watcher's address {address} is taken by a process of user {owner}")
        sock.sendall(hello)
        registration = _welcomed(sock)
        sock.settimeout(None)
    except (OSError, BadLine):
        registration = None
    except BaseException:
        sock.close()
        raise
    if registration is None:
        sock.close()
    return registration


def _welcomed(sock: socket.socket) -> Registration | None:
    lines = LineBuffer()
    # The welcome comes in one piece with the board's descriptor; what follows it may be in the same piece.
    data, descriptors, _, _ = socket.recv_fds(sock, 65536, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        first, newline, behind = data.partition(b"\n")
        if not newline or not descriptors:
            return None
        welcome = unpack(first)
        lines.feed(behind)
        return Registration(
            sock=sock,
            entry=StatusEntry(descriptors[0], int(welcome["entry"])),
            lines=lines,
            watcher_pid=int(welcome["pid"]),
            host=str(welcome["host"]),
            rank_timeout=float(welcome["rank_timeout"]),
            grace_s=float(welcome["grace_s"]),
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
