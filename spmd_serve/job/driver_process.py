"""The child process of a rank that hosts drivers: vLLM's API server, or a batch run."""

import argparse
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from multiprocessing.context import ForkProcess

from spmd_serve.config.job_spec import JobSpec, leave_steps_to_the_watcher
from spmd_serve.errors import ExitCode, PeerLost, SpmdError
from spmd_serve.job.job import REPORT_S, Job
from spmd_serve.job.spawn_main import be_main_of_spawned
from spmd_serve.liveness import End, WatcherLink, keep_answering
from spmd_serve.system import log
from spmd_serve.system.process import die_with_parent, send_signal, wait_readable
from spmd_serve.system.signals import forget_ending_signals
from spmd_serve.system.torchrun_env import clean_environ

PLUGIN = "spmd_serve"
"""Name of our ``vllm.endpoint_plugins`` entry point."""

_OTHER_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)

LOADING_TIMEOUT_S = 7 * 24 * 3600
"""Seconds that engines may take to load; vLLM's 600 s are too few, and the watcher detects hangs anyway."""
ROOT_CAUSE_S = 2.0
"""Seconds that the watcher may take to declare a root cause after a process has reported its failure."""
CHILD_END_S = 15.0
"""Seconds that a rank's child may take to exit after its engines have ended."""
ENDED_WELL = (ExitCode.OK, ExitCode.LINES_FAILED, ExitCode.STOPPED)
"""Exit codes of a child that ended normally."""


@dataclass
class DriverChild:
    """The running child, as its rank sees it."""

    name: str
    process: ForkProcess
    _pidfd: int
    _reaping: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(
        cls,
        name: str,
        body: Callable[[], int],
        spec: JobSpec,
        fork_engines: bool,
        part: tuple[int, int] = (0, 1),
        stop_error: SpmdError | None = None,
    ) -> "DriverChild":
        """Fork a process that runs `body` and exits with the code that `body` returns.

        Call it before torch starts threads and before CUDA is initialized. `name`: "API server" or "batch
        run". `fork_engines`: fork engine cores (VLLM_WORKER_MULTIPROC_METHOD is not set by the user).
        `part`: number of its endpoint, and number of endpoints. `stop_error`: see `Job.stop_error`.
        """
        process = multiprocessing.get_context("fork").Process(
            target=_run,
            args=(name, body, spec, fork_engines, part, stop_error),
            name=name.title().replace(" ", ""),
        )
        # A SIGTERM that arrives at once must not kill a child that has not installed its handler yet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.pid is not None
        return cls(name, process, os.pidfd_open(process.pid))

    def drain(self) -> None:
        """Ask the child to finish its requests and exit."""
        send_signal(self._pidfd, signal.SIGTERM)

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call `ended(exit code)` from a thread when the child exits (negative: minus a signal's number)."""

        def run() -> None:
            wait_readable(self._pidfd, None)
            ended(self._reap())

        threading.Thread(target=run, name="child-watch", daemon=True).start()

    def poll_until(
        self, condition: Callable[[], bool], call: Callable[[], None], every_s: float = 0.2
    ) -> None:
        """Call `call()` from a thread once `condition()` holds, unless the child exits before."""

        def run() -> None:
            while not wait_readable(self._pidfd, every_s):
                if condition():
                    return call()

        threading.Thread(target=run, name="child-poll", daemon=True).start()

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code (negative: a signal), or None if the child runs after `timeout_s` seconds."""
        return self._reap() if wait_readable(self._pidfd, timeout_s) else None

    def _reap(self) -> int:
        with self._reaping:
            self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


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
    child = DriverChild.start(name, body, spec, fork_engines, job.part, job.stop_error)
    job.drain_with(lambda reason: child.drain())
    job.before_exit(lambda: child.wait(REPORT_S))
    child.watch(lambda code: _child_ended(job, name, code))
    return child


def _child_ended(job: Job, name: str, code: int) -> None:
    """Announce the job's end if the child ended normally, else report its failure to the watcher."""
    if code in ENDED_WELL:
        job.announce_end(code)
    else:
        job.link.failed(how_ended(name, code))


def end(job: Job, child: DriverChild | None, drain_s: float) -> int:
    """Wait until the last child has exited and the job has ended, and return the children's exit code.

    Raises PeerLost if the child fails or does not exit in time. `drain_s`: seconds for the drain.
    """
    if child is None:
        return job.leave_together(drain_s + 2 * CHILD_END_S)
    code = child.wait(drain_s + CHILD_END_S)
    if code is None:
        raise PeerLost(f"the {child.name} (pid {child.process.pid}) has not ended in time after its engine")
    if code not in ENDED_WELL:
        # The root cause names the reason and ends this process, unless the watcher is gone too.
        threading.Event().wait(ROOT_CAUSE_S)
        raise PeerLost(how_ended(child.name, code))
    job.announce_end(code)
    return job.leave_together(drain_s + 2 * CHILD_END_S) if job.part[1] > 1 else code


def how_ended(name: str, code: int) -> str:
    """Return the message for a child that exited with `code` (negative: minus a signal's number)."""
    if code < 0:
        return f"the {name} was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"the {name} ended with exit code {code}: see its log above"


def _run(
    name: str,
    body: Callable[[], int],
    spec: JobSpec,
    fork_engines: bool,
    part: tuple[int, int],
    stop_error: SpmdError | None,
) -> None:
    # The child has its own process group: a signal to the job's group reaches it only through its rank, which
    # decides whether to drain. It stays in the session that torchrun created for the rank; without torchrun
    # it leaves the session of the terminal.
    if os.getsid(0) == os.getppid():
        os.setpgid(0, 0)
    else:
        os.setsid()
    die_with_parent(None)
    be_main_of_spawned()
    forget_ending_signals()
    prepare_environ()
    leave_steps_to_the_watcher(spec, os.environ)
    if fork_engines:
        from spmd_serve.engine import vllm_compat

        vllm_compat.fork_engine_cores()
    hello = {"kind": "api", "name": name, "rank": None}
    link = WatcherLink.connect(spec.watcher, hello, spec.join_timeout_s, on_root_cause=keep_answering)

    def leave(*_: object) -> None:
        """Exit at once on a SIGTERM while engine cores load; later, SIGTERM has another handler.

        vLLM would wait for the cores and then kill them. Here they die with this process.
        """
        code = ExitCode.OK if stop_error is None else stop_error.exit_code
        if stop_error is not None:
            log.say(f"spmd_serve: {stop_error}")
        link.announce_end(End(*part, code, unserved=True))
        os._exit(code)

    code = 0
    try:
        signal.signal(signal.SIGTERM, leave)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        code = body()
    except KeyboardInterrupt:
        pass
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except Exception as problem:
        # vLLM then stops the engines; their ranks must not mistake that for a normal end.
        link.failed(f"{type(problem).__name__}: {' '.join(str(problem).split())}")
        raise
    if code >= 0:
        link.leaving()
    sys.stdout.flush()
    sys.exit(code)


def prepare_environ() -> None:
    """Remove torchrun's variables from the environment of vLLM's processes, and set those that they need."""
    clean = clean_environ(os.environ)
    for name in set(os.environ) - set(clean):
        del os.environ[name]
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(LOADING_TIMEOUT_S))
    # The API server outlives its engine briefly to answer clients; then the watcher ends it.
    os.environ.setdefault("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        # Unset means all plugins, except endpoint plugins; naming ours must not switch off the others.
        names = {item.name for group in _OTHER_PLUGIN_GROUPS for item in entry_points(group=group)}
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(names | {PLUGIN}))
    elif PLUGIN not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{PLUGIN}"
