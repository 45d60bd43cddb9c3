"""A rank's shard in a script: in a thread of its own on every rank, for as long as the LLM is open.

Why a thread, and always: the script's main thread stays free between calls (it may train, use its own process
groups, or touch the shard's weights, which nobody uses then), the driver's heartbeats and its order to stop
are heard whatever the script does, and all ranks are alike. What PyTorch keeps per thread (inference mode,
CUDA device, number of OpenMP threads) is set in that thread. What vLLM keeps per process (its configuration
while it builds a model) is safe because the driver builds its engine only when its shard is loaded.
"""

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.serial_utils import run_method

from spmd_serve.channel.in_process import InProcessChannel
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.vllm_compat import WorkerProc
from spmd_serve.engine.worker_channel import EndOfJob
from spmd_serve.engine.worker_proc import LAST_OF_LOADING, STEP_METHODS, TorchrunWorkerProc, check_layout
from spmd_serve.liveness import WatcherLink
from spmd_serve.offline import process_group
from spmd_serve.offline.call_check import OwnCall
from spmd_serve.system import cores
from spmd_serve.system.torchrun_env import TorchrunEnv
from spmd_serve.topology import RankInfo

_SLICE_S = 1.0

OWN_CALL = "spmd_serve_own_call"
"""Worker method that runs what this rank's own script has passed to `collective_rpc` (see `OwnCall`)."""


class ScriptShard(TorchrunWorkerProc):
    """A shard that leaves the script's process as it is."""

    def __init__(
        self, *args: Any, loaded: Callable[[], None], own_calls: dict[int, OwnCall], **kwargs: Any
    ) -> None:
        self._say_loaded = loaded
        self._own_calls = own_calls
        super().__init__(*args, **kwargs)
        setattr(self.worker, OWN_CALL, self._run_own_call)

    @staticmethod
    def setup_proc_title_and_log_prefix(enable_ep: bool) -> None:
        """The process's name, and what it prints, are the script's."""

    def _init_message_queues(self, input_shm_handle: Any, vllm_config: Any) -> None:
        self._say_loaded()
        super()._init_message_queues(input_shm_handle, vllm_config)

    def _run_own_call(self, number: int) -> Any:
        return run_method(self.worker, *self._own_calls.pop(number))

    def _execute_worker_rpc(self, rpc_request: Any) -> None:
        method = rpc_request[0]
        if method in STEP_METHODS and self._loaded:
            super()._execute_worker_rpc(rpc_request)
            return
        # A script's own methods may take as long as they like, also above the time of a step.
        self._entry.state("loading")
        WorkerProc._execute_worker_rpc(self, rpc_request)
        if method == LAST_OF_LOADING:
            self._has_loaded()
        elif self._loaded:
            self._entry.state("ready")

    def run(self) -> None:
        """Run the driver's messages until it says stop; the script's objects are not frozen."""
        assert self.rpc_broadcast_mq is not None and self.worker_response_mq is not None
        self.rpc_broadcast_mq.wait_until_ready()
        self.worker_response_mq.wait_until_ready()
        try:
            self.worker_busy_loop()
        except EndOfJob:
            with process_group.kept():
                self.shutdown()
                cleanup_dist_env_and_memory()


class ShardThread:
    """Loads the shard and obeys the driver, in the background."""

    def __init__(
        self,
        vllm_config: Any,
        spec: JobSpec,
        me: RankInfo,
        store: TorchStore,
        env: TorchrunEnv,
        link: WatcherLink,
        own: InProcessChannel | None,
    ) -> None:
        """`own`: the way to the driver, on a rank that drives."""
        self._config, self._spec, self._me, self._store, self._env = vllm_config, spec, me, store, env
        self._link, self._own = link, own
        self._loaded = threading.Event()
        self._problem: BaseException | None = None
        self._shard: ScriptShard | None = None
        # A daemon: Python joins others before it calls the functions registered with atexit.
        self._thread = threading.Thread(target=self._run, name="spmd-shard", daemon=True)
        self.own_calls: dict[int, OwnCall] = {}
        """By the number of the call that they belong to; taken from here when it is run."""
        self.worker: Any = None
        """vLLM's worker, from `wait_loaded` on until the thread ends."""

    def load(self) -> None:
        """Start, and return when the shard is loaded. Raises what went wrong there."""
        self._thread.start()
        self._loaded.wait()
        if self._problem is not None:
            raise self._problem

    def join(self, timeout_s: float | None, say: Callable[[], None] = lambda: None) -> bool:
        """Wait for the driver's stop; False after `timeout_s` seconds. `say` is called every second."""
        waited = 0.0
        while self._thread.is_alive():
            if timeout_s is not None and waited >= timeout_s:
                return False
            part = _SLICE_S if timeout_s is None else min(_SLICE_S, timeout_s - waited)
            self._thread.join(part)
            waited += part
            say()
        return True

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        set_num_threads = torch.set_num_threads
        try:
            self._place()
            shard = ScriptShard(
                self._config,
                self._spec,
                self._me,
                self._store,
                self._link,
                self._own,
                loaded=self._is_loaded,
                own_calls=self.own_calls,
            )
            self._shard = shard
            self.worker = shard.worker
            torch.set_num_threads = set_num_threads  # vLLM's CPU worker has taken it from the whole process
            check_layout(self._spec, self._me)
            del shard
            self._shard.run()
        except BaseException as problem:
            self._problem = problem
            if self._loaded.is_set():
                traceback.print_exc()
                self._link.failed(f"the shard's thread failed: {type(problem).__name__}: {problem}")
        finally:
            self._shard = self.worker = None
            self._loaded.set()

    def _is_loaded(self) -> None:
        self._loaded.set()

    def _place(self) -> None:
        """This thread, and those that it starts, on the rank's share of the cores; the script's stay."""
        mine = cores.machine_share(self._spec.cluster, self._me, sorted(os.sched_getaffinity(0)))
        if mine:
            os.sched_setaffinity(0, mine)
        environ = dict(os.environ)
        cores.prepare_environ(self._env, environ)
        threads = min(int(environ[cores.THREADS]), max(len(mine), 1))
        torch.set_num_threads(threads)
