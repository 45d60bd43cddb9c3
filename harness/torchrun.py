"""The torchrun command lines that tests start."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

# Shorter than torchrun's own: how soon a lost node is noticed, how long a node waits for the others.
QUICK_CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,join_timeout=60"


@dataclass(frozen=True)
class Rendezvous:
    """How the agents of one job find each other; without one, an agent is a job of its own."""

    endpoint: str
    backend: str = "c10d"
    nnodes: str = "2"
    node_rank: int | None = None
    local_addr: str | None = None
    run_id: str = "test"
    conf: str = QUICK_CONF
    is_host: bool | None = None

    def flags(self) -> list[str]:
        conf = self.conf if self.is_host is None else f"{self.conf},is_host={str(self.is_host).lower()}"
        flags = [
            f"--nnodes={self.nnodes}",
            f"--rdzv-backend={self.backend}",
            f"--rdzv-endpoint={self.endpoint}",
        ]
        flags += [f"--rdzv-id={self.run_id}", f"--rdzv-conf={conf}"]
        if self.backend == "static":
            host, _, port = self.endpoint.rpartition(":")
            flags = [f"--nnodes={self.nnodes}", f"--master-addr={host}", f"--master-port={port}"]
        if self.node_rank is not None:
            flags.append(f"--node-rank={self.node_rank}")
        if self.local_addr is not None:
            flags.append(f"--local-addr={self.local_addr}")
        return flags


def torchrun_command(
    nproc: int,
    arguments: Sequence[str],
    *,
    rendezvous: Rendezvous | None = None,
    max_restarts: int = 0,
    module: str = "spmd_serve",
) -> list[str]:
    """`torchrun … -m spmd_serve ARGUMENTS` with this Python: one agent with `nproc` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
    command.append(f"--max-restarts={max_restarts}")
    command += ["--standalone"] if rendezvous is None else rendezvous.flags()
    return [*command, "-m", module, *arguments]


def plain_environ(**more: str) -> dict[str, str]:
    """This process's environment as a user's shell has it: nothing of torchrun's, nothing of pytest's."""
    foreign = ("TORCHELASTIC_", "PYTEST_", "GROUP_", "ROLE_")
    names = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(foreign)
    }
    return kept | more
