"""The whole program under test: torchrun's ranks on one machine, with a tiny model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.ports import free_port
from harness.server import Server
from harness.torchrun import Rendezvous, plain_environ, torchrun_command
from tests.support.endpoint import NAME, Endpoint
from tests.support.faults import rank_processes
from tests.support.footprint import Footprint
from tests.support.netns import Hosts
from tests.support.stock import ENVIRON, SMALL_FLAGS

ROOT = Path(__file__).parents[2]
HTTP_PORT, MEETING_PORT = 8000, 29500  # on simulated hosts, where every port is free
READY = "^spmd_serve: ready after"
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it no node can join later: torchrun (2.13) tells its store's address in the first round only."""


def job_environ(**more: str) -> dict[str, str]:
    """A user's shell, from which ranks can also import what tests give them."""
    return plain_environ(**ENVIRON, PYTHONPATH=str(ROOT), **more)


def own_lines(server: Server) -> list[str]:
    """What spmd_serve itself has printed."""
    return [line for line in server.text().splitlines() if line.startswith("spmd_serve: ")]


def first_cause(server: Server) -> str:
    """What torchrun prints last: the cause that it takes for the first."""
    text = server.text()
    assert "Root Cause (first observed failure)" in text, text
    return text[text.rindex("Root Cause (first observed failure)") :]


def error_lines(server: Server) -> list[str]:
    """The errors of its ranks that spmd_serve has printed, without the ranks' names."""
    found = re.findall(r"^spmd_serve: (?:rank \d+ on )?\S+: error: (.*)$", server.text(), re.MULTILINE)
    return list(map(str, found))


@dataclass
class Job:
    """A running job: its torchrun process and its HTTP endpoint. `with` starts it and ends it."""

    server: Server
    endpoint: Endpoint

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.__exit__(kind, error, trace)

    def footprint(self) -> Footprint:
        """What it holds now."""
        return Footprint.of(self.server.pid)

    def round_footprint(self) -> Footprint:
        """What its ranks and their children hold now, without the torchrun agent, which outlives a round."""
        ranks = rank_processes(self.server.pid)
        assert ranks, "no rank found: their titles may have overwritten their environment"
        return Footprint.of(*(process.pid for process in ranks.values()))

    def summary(self) -> str:
        """The first cause, in torchrun's closing block."""
        return first_cause(self.server)


def torchrun_job(
    model: Path,
    log: Path,
    *flags: str,
    ranks: int = 2,
    max_restarts: int = 0,
    small: Sequence[str] = SMALL_FLAGS,
    key: str = "none",
    environ: Mapping[str, str] | None = None,
) -> Job:
    """`torchrun --standalone -m spmd_serve MODEL FLAGS` on a free port of 127.0.0.1."""
    port = free_port()
    arguments = [str(model), f"--port={port}", "--host=127.0.0.1", f"--served-model-name={NAME}"]
    arguments += [*small, *flags]
    server = Server(
        torchrun_command(ranks, arguments, max_restarts=max_restarts),
        log,
        environ=job_environ(**(environ or {})),
        ready_line=READY,
    )
    return Job(server, Endpoint(f"http://127.0.0.1:{port}", key))


@dataclass
class HostsJob:
    """One job over simulated hosts: a torchrun process on each, the HTTP endpoint on the head."""

    hosts: Hosts
    servers: Mapping[str, Server]
    head: str

    @property
    def endpoint(self) -> Endpoint:
        """Where the head answers; ask inside `hosts.inside(name)`."""
        return Endpoint(f"http://{self.hosts.address(self.head)}:{HTTP_PORT}")

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Started on all hosts, ready on the head; all ended afterwards."""
        others = [server for host, server in self.servers.items() if host != self.head]
        with ExitStack() as stack:
            for server in [*others, self.servers[self.head]]:
                stack.enter_context(server)
            yield self

    def footprint(self) -> Footprint:
        """What all hosts hold now."""
        return Footprint.of(*(server.pid for server in self.servers.values()))

    def exit_codes(self, deadline_s: float) -> dict[str, int]:
        """Starts it on all hosts, and waits for all to end by themselves."""
        with ExitStack() as stack:
            for server in self.servers.values():
                server.ready_line = None
                stack.enter_context(server)
            return {host: server.wait_exit(deadline_s) for host, server in self.servers.items()}


def hosts_job(
    hosts: Hosts,
    model: Path,
    log: Path,
    *flags: str,
    ranks: int = 1,
    only: Mapping[str, Sequence[str]] | None = None,
    modules: Mapping[str, str] | None = None,
    prefix: Mapping[str, Sequence[str]] | None = None,
    head: str | None = None,
    max_restarts: int = 0,
    nnodes: str | None = None,
    backend: str = "c10d",
    environ: Mapping[str, str] | None = None,
) -> HostsJob:
    """The same torchrun line on every host, meeting at the first one.

    only: flags for single hosts; modules: what runs there instead of spmd_serve; prefix: a command that runs
    torchrun there; head: the host that will serve (the flags must say so).  nnodes: torchrun's, as 1:4
    (default: all hosts).
    """
    first = hosts.names[0]
    servers = {}
    for number, host in enumerate(hosts.names):
        meeting = Rendezvous(
            f"{hosts.address(first)}:{MEETING_PORT}",
            backend=backend,
            nnodes=nnodes or str(len(hosts.names)),
            node_rank=number if backend == "static" else None,
            local_addr=hosts.address(host),
        )
        arguments = [str(model), f"--port={HTTP_PORT}", f"--served-model-name={NAME}", *SMALL_FLAGS]
        arguments += [*flags, *(only or {}).get(host, ())]
        module = (modules or {}).get(host, "spmd_serve")
        command = torchrun_command(
            ranks,
            arguments,
            rendezvous=meeting,
            max_restarts=max_restarts,
            module=module,
        )
        servers[host] = Server(
            hosts.command(host, [*(prefix or {}).get(host, ()), *command]),
            log / host,
            environ=job_environ(**(environ or {})),
            ready_line=READY if host == (head or first) else None,
        )
    return HostsJob(hosts, servers, head or first)
