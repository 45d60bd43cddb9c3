"""A rank's child that hosts drivers: started, watched, waited for at the end."""

import argparse
import threading
from collections.abc import Callable

from spmd_serve.config.job_spec import JobSpec
from spmd_serve.errors import ExitCode, PeerLost
from spmd_serve.job.driver_process import DriverChild, how_ended
from spmd_serve.job.job import REPORT_S, Job

VERDICT_S = 2.0
"""How long a verdict may take, once an accusation of a process's own is made."""
CHILD_END_S = 15.0
"""How long a rank's child may take to end after its engines have ended."""
ENDED_WELL = (ExitCode.OK, ExitCode.LINES_FAILED, ExitCode.STOPPED)
"""Exit codes of a child that ended as it should."""


def start_child(
    job: Job,
    args: argparse.Namespace,
    spec: JobSpec,
    name: str,
    body: Callable[[], int],
    fork_engines: bool,
) -> DriverChild:
    """Fork the process that hosts this endpoint's drivers."""
    from spmd_serve.engine.config import apply_executor
    from spmd_serve.engine.coordinator import watch_coordinators

    apply_executor(args, spec)
    watch_coordinators(spec)
    child = DriverChild.start(name, body, spec, fork_engines, job.part, job.early_end)
    job.drain_with(lambda reason: child.drain())
    job.before_exit(lambda: child.wait(REPORT_S))
    child.watch(lambda code: _child_ended(job, name, code))
    return child


def _child_ended(job: Job, name: str, code: int) -> None:
    """The drivers' process ended, sent home by its work's end or before any engine could start."""
    if code in ENDED_WELL:
        job.announce_end(code)
    else:
        job.link.failed(how_ended(name, code))


def end(job: Job, child: DriverChild | None, drain_s: float) -> int:
    """All ranks leave together, when the last child has done its last, with the code of the children."""
    if child is None:
        return job.leave_together(drain_s + 2 * CHILD_END_S)
    code = child.wait(drain_s + CHILD_END_S)
    if code is None:
        raise PeerLost(f"the {child.name} (pid {child.process.pid}) has not ended in time after its engine")
    if code not in ENDED_WELL:
        # The verdict knows why and ends this process, unless the watcher is gone too.
        threading.Event().wait(VERDICT_S)
        raise PeerLost(how_ended(child.name, code))
    job.announce_end(code)
    return job.leave_together(drain_s + 2 * CHILD_END_S) if job.part[1] > 1 else code
