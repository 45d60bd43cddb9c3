"""vLLM's coordinator of data-parallel replicas, as a member of its host's watcher.

vLLM looks whether it lives only where there are several API servers, and never whether it stands still: load
figures would stop, and replicas of a MoE model would not wake each other.
"""

import functools
import os
import signal
import threading
from typing import Any

from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine import vllm_compat
from spmd_serve.liveness import WatcherLink, keep_answering
from spmd_serve.system.process import die_with_parent
from spmd_serve.system.signals import ENDING

NAME = "coordinator of replicas"


def watch_coordinators(spec: JobSpec) -> None:
    """From now on a coordinator that vLLM starts below this process, by fork or spawn, is a member."""
    vllm_compat.run_coordinators_by(functools.partial(run, spec), ENDING)


def run(spec: JobSpec, /, **given: Any) -> None:
    """The main function of the coordinator's process; `given`: what vLLM's own takes."""
    die_with_parent(None)
    # SIGTERM is blocked in all threads. Who signals every process of a job (systemd, scancel) does not mean
    # this one: rank 0 decides when the engines that need it are done, and vLLM's comes from our parent.
    hello = {"kind": "coordinator", "name": NAME, "rank": None}
    link = WatcherLink.connect(spec.watcher, hello, spec.join_timeout_s, on_root_cause=keep_answering)
    threading.Thread(target=_leave_with_parents_leave, args=(link,), name="signals", daemon=True).start()
    vllm_compat.run_coordinator(**given)


def _leave_with_parents_leave(link: WatcherLink) -> None:
    while signal.sigwaitinfo(ENDING).si_pid != os.getppid():
        pass
    link.leaving()
    os._exit(0)
