"""Rank 0's child: the process whose engine cores drive the ranks (vLLM's API server, or a batch run)."""

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
from spmd_serve.errors import ExitCode, SpmdError
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
"""vLLM gives engines 600 s to load. Here the watcher says who is dead or hung, so loading may take long."""


@dataclass
class DriverChild:
    """The running child, as rank 0 sees it."""

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
        early_end: SpmdError | None = None,
    ) -> "DriverChild":
        """Fork, and run `body` there; what it returns is the exit code.

        Call before any thread of torch runs and before CUDA is touched. `name`: "API server" or "batch run".
        `fork_engines`: nobody asked for another way (VLLM_WORKER_MULTIPROC_METHOD) to start engine cores.
        `part`: which of how many endpoints it is. `early_end`: see `Job.early_end`.
        """
        process = multiprocessing.get_context("fork").Process(
            target=_run,
            args=(name, body, spec, fork_engines, part, early_end),
            name=name.title().replace(" ", ""),
        )
        # SIGTERM may come at once, and must not kill a child that can't yet turn it into an orderly end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.pid is not None
        return cls(name, process, os.pidfd_open(process.pid))

    def drain(self) -> None:
        """Ask it to finish what is running and leave."""
        send_signal(self._pidfd, signal.SIGTERM)

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call `ended(exit code)` from a thread when it ends (negative: minus the signal's number)."""

        def run() -> None:
            wait_readable(self._pidfd, None)
            ended(self._reap())

        threading.Thread(target=run, name="child-watch", daemon=True).start()

    def poll_until(
        self, condition: Callable[[], bool], call: Callable[[], None], every_s: float = 0.2
    ) -> None:
        """Call `call()` from a thread once `condition()` holds, unless the child ends before."""

        def run() -> None:
            while not wait_readable(self._pidfd, every_s):
                if condition():
                    return call()

        threading.Thread(target=run, name="child-poll", daemon=True).start()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code (negative: a signal), or None when it has not ended within `timeout_s` seconds."""
        return self._reap() if wait_readable(self._pidfd, timeout_s) else None

    def _reap(self) -> int:
        with self._reaping:
            self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


def how_ended(name: str, code: int) -> str:
    """The words for a child that failed with an exit code, or by minus a signal's number."""
    if code < 0:
        return f"the {name} was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"the {name} ended with exit code {code}: see its log above"


def _run(
    name: str,
    body: Callable[[], int],
    spec: JobSpec,
    fork_engines: bool,
    part: tuple[int, int],
    early_end: SpmdError | None,
) -> None:
    # A process group of its own: a signal to that of the job reaches it only through rank 0, which decides
    # whether that means drain. It stays in the session that torchrun made for the rank; without torchrun it
    # leaves that of the terminal.
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
        """Nobody is served while engine cores load (later, SIGTERM has another handler): leave.

        vLLM would wait for the cores first, and then kill them; so they die with this process.
        """
        code = ExitCode.OK if early_end is None else early_end.exit_code
        if early_end is not None:
            log.say(f"spmd_serve: {early_end}")
        link.announce_end(End(*part, code, early=True))
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
        # vLLM then sends the engines home, whose ranks must not take that for a normal end.
        link.failed(f"{type(problem).__name__}: {' '.join(str(problem).split())}")
        raise
    if code >= 0:
        link.leaving()
    sys.stdout.flush()
    sys.exit(code)


def prepare_environ() -> None:
    """What vLLM's processes below rank 0 must not inherit from torchrun, and what they need."""
    clean = clean_environ(os.environ)
    for name in set(os.environ) - set(clean):
        del os.environ[name]
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(LOADING_TIMEOUT_S))
    # The API server outlives its engine by a moment, in which it answers clients; the watcher ends it then.
    os.environ.setdefault("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        # Unset means all plugins, except endpoint plugins; naming ours must not switch off the others.
        names = {item.name for group in _OTHER_PLUGIN_GROUPS for item in entry_points(group=group)}
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(names | {PLUGIN}))
    elif PLUGIN not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{PLUGIN}"
