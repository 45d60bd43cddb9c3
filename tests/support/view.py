"""A watcher's view of its job, for processes that are not members."""

import socket
import time
from typing import Any

from spmd_serve.liveness.status import socket_name
from spmd_serve.wire.lines import BadLine, LineBuffer, pack, unpack


def fetch_view(address: str, timeout_s: float) -> dict[str, Any]:
    """Return the view of the watcher at `address`.

    Raises OSError: ConnectionRefusedError if no watcher listens, TimeoutError after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    lines = LineBuffer()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(timeout_s)
        sock.connect(socket_name(address))
        sock.sendall(pack({"t": "view"}))
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the watcher has not answered within {timeout_s:g} s")
            sock.settimeout(left)
            data = sock.recv(65536)
            if not data:
                raise ConnectionResetError("the watcher has closed the connection")
            try:
                lines.feed(data)
                for line in lines.take():
                    view = unpack(line)["view"]
                    if isinstance(view, dict):
                        return view
            except (BadLine, KeyError) as problem:
                raise ConnectionResetError(f"not a watcher's answer: {problem}") from problem
