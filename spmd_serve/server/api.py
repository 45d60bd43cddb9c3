"""Rank 0's child: vLLM's stock API server, whose engine cores drive the ranks."""

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

from spmd_serve.control import ControlSpec
from spmd_serve.liveness import Verdict, WatcherLink
from spmd_serve.process import die_with_parent, send_signal, wait_readable
from spmd_serve.server.door import Door, about_to_listen
from spmd_serve.signals import forget_ending_signals
from spmd_serve.torchrun_env import clean_environ

PLUGIN = "spmd_serve"
"""Name of our ``vllm.endpoint_plugins`` entry point."""

_OTHER_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)

_LISTENING_POLL_S = 0.2

LOADING_TIMEOUT_S = 7 * 24 * 3600
"""vLLM gives engines 600 s to load. Here the watcher says who is dead or hung, so loading may take long."""


@dataclass
class ApiServer:
    """The running child, as rank 0 sees it."""

    process: ForkProcess
    _pidfd: int
    _reaping: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(
        cls, args: argparse.Namespace, spec: ControlSpec, door: Door, url: str, *, fork_engines: bool
    ) -> "ApiServer":
        """Fork the API server. Call before any thread of torch and before CUDA is touched.

        `fork_engines`: nobody asked for another way (VLLM_WORKER_MULTIPROC_METHOD) to start engine cores.
        """
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(args, spec, door, url, fork_engines), name="APIServer"
        )
        process.start()
        door.sock.close()
        assert process.pid is not None
        return cls(process, os.pidfd_open(process.pid))

    def drain(self) -> None:
        """Ask it to finish what is running (``--shutdown-timeout``) and leave."""
        send_signal(self._pidfd, signal.SIGTERM)

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call `ended(exit code)` from a thread when it ends (negative: minus the signal's number)."""

        def run() -> None:
            wait_readable(self._pidfd, None)
            with self._reaping:
                self.process.join()
            assert self.process.exitcode is not None
            ended(self.process.exitcode)

        threading.Thread(target=run, name="api-watch", daemon=True).start()

    def when_listening(self, door: Door, call: Callable[[], None]) -> None:
        """Call `call()` from a thread once connections are accepted."""

        def run() -> None:
            while not wait_readable(self._pidfd, _LISTENING_POLL_S):
                if door.answers():
                    return call()

        threading.Thread(target=run, name="api-listening", daemon=True).start()

    def wait_for_last_words(self, timeout_s: float) -> None:
        """Give it `timeout_s` seconds to tell its clients what happened."""
        wait_readable(self._pidfd, timeout_s)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code (negative: a signal), or None when it has not ended within `timeout_s` seconds."""
        if not wait_readable(self._pidfd, timeout_s):
            return None
        with self._reaping:
            self.process.join()
        return self.process.exitcode


def _run(args: argparse.Namespace, spec: ControlSpec, door: Door, url: str, fork_engines: bool) -> None:
    # A session of its own: a signal to the job's process group reaches it only through rank 0, which
    # decides whether that means drain.
    os.setsid()
    die_with_parent(None)
    forget_ending_signals()
    prepare_environ()
    hello = {"kind": "api", "name": "API server", "rank": None}
    link = WatcherLink.connect(spec.watcher, hello, spec.join_timeout_s, on_verdict=_on_verdict)
    try:
        serve_http(args, door, url, fork_engines)
    except KeyboardInterrupt:
        pass
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    link.leaving()
    sys.stdout.flush()


def _on_verdict(verdict: Verdict) -> None:
    """Keep answering: clients get an error from the engine's end; the watcher's grace time ends us."""


def prepare_environ() -> None:
    """What vLLM's processes below rank 0 must not inherit from torchrun, and what they need."""
    clean = clean_environ(os.environ)
    for name in set(os.environ) - set(clean):
        del os.environ[name]
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(LOADING_TIMEOUT_S))
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        # Unset means all plugins, except endpoint plugins; naming ours must not switch off the others.
        names = {item.name for group in _OTHER_PLUGIN_GROUPS for item in entry_points(group=group)}
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(names | {PLUGIN}))
    elif PLUGIN not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{PLUGIN}"


def serve_http(args: argparse.Namespace, door: Door, url: str, fork_engines: bool) -> None:
    """Run vLLM's API server(s) on our socket until they are told to stop."""
    import uvloop
    from vllm.entrypoints.cli import serve as vllm_serve
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.launcher import set_ulimit, validate_api_server_args

    from spmd_serve.engine import seam
    from spmd_serve.server import endpoints

    validate_api_server_args(args)
    set_ulimit()
    if fork_engines:
        seam.fork_engine_cores()
    args.port = door.port
    several = args.api_server_count if args.api_server_count is not None else args.data_parallel_size
    if several > 1:
        about_to_listen(door.sock)
        args.api_server_count = several
        # run_multi_api_server binds by itself; ours is bound already.
        vllm_serve.setup_server = lambda args, *, reuse_port: (url, door.sock)
        vllm_serve.run_multi_api_server(args)
        return
    args.api_server_count = None
    endpoints.LISTENING = door.sock

    def interrupt_loading(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    signal.signal(signal.SIGTERM, interrupt_loading)
    uvloop.run(entry.run_server_worker(url, door.sock, args))
