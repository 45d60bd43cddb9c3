"""Simulated hosts on one machine: network namespaces joined by a switch, each with a hostname and /etc/hosts.

Everything, the switch too, lives in namespaces of this run: runs side by side do not meet, and removing the
namespaces removes all. Needs root and iproute2.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

from harness.processes import Process, assert_gone, everybody, kill, look

NETWORK = "10.231.7"  # addresses inside the namespaces only
COMMAND_LIMIT_S = 20.0
CLONE_NEWNET = 0x40000000

Names = Literal["right", "loopback"]

_libc = ctypes.CDLL(None, use_errno=True)

# hostname and /etc/hosts need namespaces of their own; every step execs, so the pid stays the same.
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def why_not() -> str | None:
    """Why hosts can't be simulated here, or None."""
    if os.geteuid() != 0:
        return "simulated hosts need root"
    missing = [tool for tool in ("ip", "unshare", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"simulated hosts need {', '.join(missing)} (apt-get install iproute2 util-linux hostname)"
    probe = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, timeout=10, check=False
    )
    return (
        None if probe.returncode == 0 else f"simulated hosts need network namespaces: {probe.stderr.strip()}"
    )


class Hosts:
    """`with Hosts("node0", "node1") as hosts:` gives hosts that reach each other at `hosts.address(name)`.

    own_name: what a host finds for its own name in /etc/hosts: "right" its address, "loopback" 127.0.1.1 (as
    Debian's installer writes it). Other hosts' names are always right.
    """

    def __init__(self, *names: str, own_name: Names = "right") -> None:
        run = f"{os.getpid()}-{secrets.token_hex(3)}"
        self.names = names
        self.own_name = own_name
        self._switch = f"spmd-{run}-switch"
        self._namespaces = {name: f"spmd-{run}-{name}" for name in names}
        self._files: tempfile.TemporaryDirectory[str] | None = None

    def address(self, host: str) -> str:
        return f"{NETWORK}.{self.names.index(host) + 10}"

    def popen(
        self,
        host: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Starts a command on a host; its pid is the command's own."""
        return subprocess.Popen(
            self.command(host, command),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=None if environ is None else dict(environ),
            start_new_session=True,
        )

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host, for those who start processes by themselves."""
        enter = [
            "ip",
            "netns",
            "exec",
            self._namespaces[host],
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            _ENTER,
        ]
        return [*enter, "sh", host, str(self._hosts_file(host)), *command]

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """The calling thread opens its sockets on that host inside the block: so a test is a client there."""
        with (
            open("/proc/thread-self/ns/net", "rb") as home,
            open(f"/run/netns/{self._namespaces[host]}", "rb") as there,
        ):
            _setns(there.fileno())
            try:
                yield
            finally:
                _setns(home.fileno())

    def cut(self, host: str) -> None:
        """Cut the node off, as a pulled cable does: no packet announces it."""
        _ip("-n", self._switch, "link", "set", self._port(host), "down")

    def mend(self, host: str) -> None:
        """Restore the link."""
        _ip("-n", self._switch, "link", "set", self._port(host), "up")

    def processes(self, host: str) -> list[Process]:
        """Everything that runs on a host now."""
        identity = os.stat(f"/run/netns/{self._namespaces[host]}").st_ino
        return [process for process in everybody() if _namespace_of(process.pid) == identity]

    def __enter__(self) -> Self:
        _remove_stale()
        self._files = tempfile.TemporaryDirectory(prefix="spmd-hosts-")
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [process for host in self.names for process in self.processes(host)]
        try:
            if kind is None and left:
                assert_gone(left, 5.0)
        finally:
            kill(left)
            self._remove()

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host, namespace in self._namespaces.items():
            port = self._port(host)
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            peer = ["peer", "name", port, "netns", self._switch]
            _ip("-n", namespace, "link", "add", "eth0", "type", "veth", *peer)
            _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            self._hosts_file(host).write_text(self._hosts_text(host), encoding="utf-8")

    def _remove(self) -> None:
        for namespace in [*self._namespaces.values(), self._switch]:
            if Path(f"/run/netns/{namespace}").exists():
                _ip("netns", "del", namespace)
        if self._files is not None:
            self._files.cleanup()
            self._files = None

    def _port(self, host: str) -> str:
        return f"port{self.names.index(host)}"

    def _hosts_file(self, host: str) -> Path:
        assert self._files is not None, "the hosts exist inside the with block only"
        return Path(self._files.name) / host

    def _hosts_text(self, me: str) -> str:
        lines = ["127.0.0.1 localhost"]
        for host in self.names:
            address = "127.0.1.1" if host == me and self.own_name == "loopback" else self.address(host)
            lines.append(f"{address} {host}")
        return "\n".join(lines) + "\n"


def _remove_stale() -> None:
    """Removes the namespaces of runs that were killed before they could: their names hold the run's pid."""
    for file in Path("/run/netns").glob("spmd-*"):
        pid = file.name.split("-")[1]
        if pid.isdigit() and look(int(pid)) is None:
            identity = file.stat().st_ino
            kill(process for process in everybody() if _namespace_of(process.pid) == identity)
            _ip("netns", "del", file.name)


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _namespace_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None
