"""``--probe-port``: the port on which each node's watcher answers probes, opened before loading."""

import time

from spmd_serve.errors import SpmdError, UsageError
from spmd_serve.job.job import Job
from spmd_serve.system.network import host_name

_RELEASE_S = 3.0
"""Seconds for which the watcher of the previous round may still hold the port."""
_RETRY_S = 0.2


def open_probes(job: Job) -> None:
    """Open the port on every node. Raises the same UsageError on all ranks if one node cannot open it."""
    port = job.flags.probe_port
    if port is None:
        return
    with job.voting("the probe port"):
        if job.env.local_rank == 0:
            opened = _open(job, port)
            if port == 0:
                job.say(f"{host_name()} answers probes on port {opened}")


def _open(job: Job, port: int) -> int:
    until = time.monotonic() + _RELEASE_S
    while True:
        try:
            return job.link.open_probe(port)
        except SpmdError as problem:
            if time.monotonic() > until:
                raise UsageError(
                    f"--probe-port {port} cannot be opened on {host_name()}: {problem}; stop what has it, or "
                    "give another one (0: any free port, which agents that share a machine need)"
                ) from problem
        time.sleep(_RETRY_S)
