"""One job of several torchrun agents on this machine, which stand for nodes, with one endpoint or several."""

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.ports import free_port
from harness.server import START_DEADLINE_S, STOP_DEADLINE_S, Server
from harness.torchrun import Rendezvous, torchrun_command
from harness.waiting import wait_until
from tests.support.endpoint import NAME, Endpoint
from tests.support.footprint import Footprint
from tests.support.job import READY, error_lines, job_environ
from tests.support.stock import SMALL_FLAGS


@dataclass(frozen=True)
class AgentsJob:
    """Its torchrun processes, in no order that tells of ranks, and its endpoints, by their first replica."""

    servers: Sequence[Server]
    endpoints: Sequence[Endpoint]

    @contextmanager
    def running(self, start_deadline_s: float = START_DEADLINE_S) -> Iterator[Self]:
        """Started, every endpoint ready; all ended afterwards."""
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            wait_until(self._is_ready, start_deadline_s, f"{len(self.endpoints)} endpoints to be ready")
            yield self
            self._stop()

    def _stop(self) -> None:
        """As a job manager does: a signal to all agents, or the others wait 300 s for the one that has it."""
        for server in self.servers:
            if server.returncode is None:
                os.kill(server.pid, signal.SIGTERM)
        for server in self.servers:
            server.wait_exit(STOP_DEADLINE_S)

    def _is_ready(self) -> bool:
        ended = next((server for server in self.servers if server.returncode is not None), None)
        assert ended is None, f"ended with {ended and ended.returncode}:\n{ended and ended.tail()}"
        return len(re.findall(READY, self.text(), re.MULTILINE)) == len(self.endpoints)

    def text(self) -> str:
        """What all agents have printed so far."""
        return "\n".join(server.text() for server in self.servers)

    def footprint(self) -> Footprint:
        """What all agents hold now."""
        return Footprint.of(*(server.pid for server in self.servers))

    def refusal(self, deadline_s: float) -> str:
        """Starts it, and waits for all to end by themselves: the one error that all of them print."""
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            codes = {server.wait_exit(deadline_s) for server in self.servers}
        said = {line for server in self.servers for line in error_lines(server)}
        assert codes == {1} and len(said) == 1, (codes, said)
        return said.pop()


def agents_job(
    model: Path,
    log: Path,
    *flags: str,
    nodes: int,
    ranks: int,
    endpoints: int = 1,
    ports: Sequence[int] = (),
    small: Sequence[str] = SMALL_FLAGS,
    environ: Mapping[str, str] | None = None,
    backend: str = "c10d",
    meeting: str | None = None,
    max_restarts: int = 0,
) -> AgentsJob:
    """The same torchrun line `nodes` times, `ranks` ranks each, meeting on the loopback.

    ports: of the endpoints (default: free ones).  backend, meeting: of the rendezvous, and host:port where it
    is (default: a free port).
    """
    taken = list(ports) or [free_port() for _ in range(endpoints)]
    meeting = meeting or f"127.0.0.1:{free_port()}"
    arguments = [str(model), f"--port={','.join(map(str, taken))}", "--host=127.0.0.1"]
    arguments += [f"--served-model-name={NAME}", *small, *flags]
    servers = []
    for number in range(nodes):
        node_rank = number if backend == "static" else None
        rendezvous = Rendezvous(meeting, backend, str(nodes), node_rank)
        command = torchrun_command(ranks, arguments, rendezvous=rendezvous, max_restarts=max_restarts)
        servers.append(Server(command, log / f"agent{number}", environ=job_environ(**(environ or {}))))
    return AgentsJob(servers, [Endpoint(f"http://127.0.0.1:{port}") for port in taken])
