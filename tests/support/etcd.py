"""A real etcd server with its v2 API, for torchrun's etcd backends."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from harness.ports import free_port
from harness.server import Server

READY = "ready to serve client requests"


def why_not() -> str | None:
    """Why there can be none here, or None."""
    if shutil.which("etcd") is None:
        return "no etcd on PATH: apt-get install etcd-server (3.4: later ones have no v2 API)"
    if importlib.util.find_spec("etcd") is None:
        return "no python-etcd, which torchrun's etcd backends need: pip install python-etcd"
    return None


@contextlib.contextmanager
def etcd_server(folder: Path) -> Iterator[tuple[Server, str]]:
    """A running server and its "host:port"."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = ["etcd", "--enable-v2", f"--data-dir={folder / 'data'}", "--name=test"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=test={peer}"]
    with Server(command, folder / "etcd.log", ready_line=READY) as server:
        yield server, client.removeprefix("http://")
