"""vLLM's coordinator of data-parallel replicas, as a member of its node's watcher.

vLLM checks that its coordinator is alive only with several API servers, and never that it makes progress.
Without it load figures stop, and replicas of a MoE model do not wake each other.
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
    """Make every coordinator that vLLM starts from this process, by fork or spawn, a member."""
    vllm_compat.run_coordinators_by(functools.partial(run, spec), ENDING)


def run(spec: JobSpec, /, **given: Any) -> None:
    """Run the coordinator's process; `given` are the arguments of vLLM's own main function."""
    die_with_parent(None)
    # SIGTERM is blocked in all threads. systemd and scancel signal every process of a job, but this one must
    # stay while engines need it: rank 0 decides that, and only the parent's signal ends this process.
    hello = {"kind": "coordinator", "name": NAME, "rank": None}
    link = WatcherLink.connect(spec.watcher, hello, spec.join_timeout_s, on_root_cause=keep_answering)
    threading.Thread(target=_exit_on_parents_signal, args=(link,), name="signals", daemon=True).start()
    vllm_compat.run_coordinator(**given)


def _exit_on_parents_signal(link: WatcherLink) -> None:
    while signal.sigwaitinfo(ENDING).si_pid != os.getppid():
        pass
    link.leaving()
    os._exit(0)
