"""Jobs that fail and come back: started without a model, asked which round of theirs serves."""

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.faults import rank_processes
from tests.support.footprint import Footprint
from tests.support.job import HTTP_PORT, MEETING_PORT, UNSHARED, job_environ
from tests.support.netns import Hosts
from tests.support.ports import free_port
from tests.support.server import Server
from tests.support.torchrun import Rendezvous, torchrun_command
from tests.support.waiting import wait_until

MODULE = "tests.support.light_job"
SERVE_S = 90.0
ASK_S = 2.0

Round = dict[str, Any]
"""What a light job answers: its generation, dp, hosts, the pids of its ranks, and `noticed_at`: the Unix time

of the last failure's verdict, 0 where there was none."""


def noticed(at: float, clock: float) -> str:
    """How long after the Unix time `clock` the verdict was, which the next round remembers to be of `at`.

    Nothing where nobody has kept a note of it, for the (head's) watcher is what was killed.
    """
    return f"noticed after {at - clock:.2f} s, " if at > clock else ""


@dataclass
class LightJob:
    """Agents of one job, by number; those that were not started yet can join later."""

    servers: list[Server]
    url: str
    hosts: Hosts | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self, *agents: int) -> None:
        """Start these agents, all where none is named."""
        for number in agents or range(len(self.servers)):
            server = self.servers[number]
            self._stack.callback(server.end)
            server.start()

    def round_now(self) -> Round | None:
        """The round that answers now."""
        head = nullcontext() if self.hosts is None else self.hosts.inside(self.hosts.names[0])
        with contextlib.suppress(OSError, ValueError), head:
            answer = urllib.request.urlopen(self.url, timeout=ASK_S)
            with answer:
                found: Round = json.load(answer)
                return found
        return None

    def served(self, after: Round | None = None, deadline_s: float = SERVE_S) -> Round:
        """Waits until a round serves, another one than `after`; AssertionError shows the agents' logs."""

        def fresh() -> Round | None:
            found = self.round_now()
            return found if found and (after is None or found["round_id"] != after["round_id"]) else None

        try:
            return wait_until(fresh, deadline_s, "a round to serve")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.logs()}") from None

    def ranks(self) -> Footprint:
        """What all ranks and their children hold now, without the agents."""
        agents = [server.pid for server in self.servers if server.is_running]
        return Footprint.of(*(rank.pid for pid in agents for rank in rank_processes(pid).values()))

    def logs(self) -> str:
        """The end of every agent's log."""
        return "\n".join(
            f"--- {server.log}\n{server.tail()}" for server in self.servers if server.log.exists()
        )


@contextlib.contextmanager
def light_job(
    log: Path,
    *flags: str,
    agents: int = 1,
    ranks: int = 1,
    nnodes: str | None = None,
    backend: str = "c10d",
    endpoint: str | None = None,
    max_restarts: int = 0,
    shared_store: bool = False,
    hosts: Hosts | None = None,
) -> Iterator[LightJob]:
    """A job of `agents` torchruns on this machine (or one on each of `hosts`), started by `start`.

    shared_store: torchrun's default, with which its agent serves the store of the ranks; see UNSHARED.
    """
    names = hosts.names if hosts is not None else ["127.0.0.1"] * agents
    addresses = [hosts.address(name) if hosts is not None else name for name in names]
    port, meeting = (HTTP_PORT, MEETING_PORT) if hosts is not None else (free_port(), free_port())
    servers = []
    for number, address in enumerate(addresses):
        rendezvous = Rendezvous(
            endpoint or f"{addresses[0]}:{meeting}",
            backend=backend,
            nnodes=nnodes or str(len(names)),
            node_rank=number if backend == "static" else None,
            local_addr=address,
            # All agents here have the endpoint's address: the first one is to serve torchrun's store.
            is_host=number == 0 if backend == "c10d" and hosts is None else None,
        )
        arguments = [f"--port={port}", *flags]
        command = torchrun_command(
            ranks, arguments, rendezvous=rendezvous, max_restarts=max_restarts, module=MODULE
        )
        if hosts is not None:
            command = hosts.command(names[number], command)
        servers.append(
            Server(
                command,
                log / f"agent{number}",
                environ=job_environ(**({} if shared_store else UNSHARED)),
            )
        )
    job = LightJob(servers, f"http://{addresses[0]}:{port}/", hosts)
    with job._stack:
        yield job
