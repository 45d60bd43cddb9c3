"""TCP ports for servers that need a number before they start."""

import os
import random
import socket
from pathlib import Path

# The number of this pytest-xdist worker, and how many there are: each uses ports of its own.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

_given: set[int] = {29400, 29500}  # torchrun's defaults


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port without a listener that the kernel does not assign by itself.

    The kernel may use a port that bind(0) has returned for an outgoing connection before the server binds it.
    So this port lies below the kernel's range, is chosen at random and tried, and is returned once only, to
    one worker of a run.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = range(max(1024, lowest - 15000) + _WORKER % _WORKERS, lowest, _WORKERS)
    candidates = [port for port in own if port not in _given]
    for port in random.SystemRandom().sample(candidates, min(200, len(candidates))):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError(f"no free port below {lowest} on {address}")
