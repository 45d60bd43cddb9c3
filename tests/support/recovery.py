"""Jobs without a model that fail and restart; tests ask which round of a job serves."""

import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.ports import free_port
from harness.server import Server
from harness.torchrun import Rendezvous, torchrun_command
from harness.waiting import wait_until
from tests.support.faults import rank_processes
from tests.support.footprint import Footprint
from tests.support.job import HTTP_PORT, MEETING_PORT, UNSHARED, job_environ
from tests.support.netns import Hosts

MODULE = "tests.support.light_job"
SERVE_S = 90.0
ASK_S = 2.0

Round = dict[str, Any]
"""A light job's answer: round id, DP, hostnames, pids of the ranks, and `detected_at`: the Unix time at
which the root cause of the last failure was declared, 0 without a failure."""


def detected(at: float, clock: float) -> str:
    """Say how long after the Unix time `clock` the root cause was declared; `at` is the job's record of that.

    Empty without such a record, because the head's watcher itself was killed.
    """
    return f"detected after {at - clock:.2f} s, " if at > clock else ""


@dataclass
class LightJob:
    """Agents of one job, by number; agents that have not been started can join later."""

    servers: list[Server]
    url: str
    hosts: Hosts | None = None

    def start(self, *agents: int) -> None:
        """Start these agents, or all of them if none is given."""
        for number in agents or range(len(self.servers)):
            self.servers[number].start()

    def end(self) -> None:
        """End all agents at once: torchrun's static rendezvous waits 300 s for agents that have left."""
        running = [server for server in self.servers if server.is_running]
        for server in running:
            os.kill(server.pid, signal.SIGTERM)
        for server in running:
            server.end()

    def round_now(self) -> Round | None:
        """Return the answer of the round that serves now, or None."""
        head = nullcontext() if self.hosts is None else self.hosts.inside(self.hosts.names[0])
        with contextlib.suppress(OSError, ValueError), head:
            answer = urllib.request.urlopen(self.url, timeout=ASK_S)
            with answer:
                found: Round = json.load(answer)
                return found
        return None

    def served(self, after: Round | None = None, deadline_s: float = SERVE_S) -> Round:
        """Wait until a round other than `after` serves; AssertionError shows the agents' logs."""

        def fresh() -> Round | None:
            found = self.round_now()
            return found if found and (after is None or found["round_id"] != after["round_id"]) else None

        try:
            return wait_until(fresh, deadline_s, "a round to serve")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.logs()}") from None

    def ranks(self) -> Footprint:
        """Return what all ranks and their children hold now, without the agents."""
        agents = [server.pid for server in self.servers if server.is_running]
        return Footprint.of(*(rank.pid for pid in agents for rank in rank_processes(pid).values()))

    def logs(self) -> str:
        """Return the end of every agent's log."""
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
    """Yield a job of `agents` torchruns on this machine (or one on each of `hosts`); `start` starts it.

    shared_store: torchrun's default, in which its agent serves the store of the ranks; see UNSHARED.
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
            # All agents here have the endpoint's address; the first one must serve torchrun's store.
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
    try:
        yield job
    finally:
        job.end()
