"""Run the shard of a script's rank in a thread of its own while the LLM is open.

Every rank uses a thread. The script's main thread stays free between calls: it may train, use its own process
groups, or change the shard's weights, which are not in use then. The thread receives the driver's heartbeats
and its stop message at any time. PyTorch's state per thread (inference mode, CUDA device, number of OpenMP
threads) is set in this thread. vLLM's state per process (its configuration while it builds a model) is not
shared, because the driver creates its engine only after its shard is loaded.
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

OWN_CALL = "spmd_serve_own_call"
"""Worker method that runs the function that this rank's script passed to `collective_rpc` (see `OwnCall`)."""


class ScriptShard(TorchrunWorkerProc):
    """A shard that does not change the settings of the script's process."""

    def __init__(
        self, *args: Any, loaded: Callable[[], None], own_calls: dict[int, OwnCall], **kwargs: Any
    ) -> None:
        self._on_loaded = loaded
        self._own_calls = own_calls
        super().__init__(*args, **kwargs)
        setattr(self.worker, OWN_CALL, self._run_own_call)

    @staticmethod
    def setup_proc_title_and_log_prefix(enable_ep: bool) -> None:
        """Do nothing: the script keeps its process name, and its output has no prefix."""

    def _init_message_queues(self, input_shm_handle: Any, vllm_config: Any) -> None:
        self._on_loaded()
        super()._init_message_queues(input_shm_handle, vllm_config)

    def _run_own_call(self, number: int) -> Any:
        return run_method(self.worker, *self._own_calls.pop(number))

    def _execute_worker_rpc(self, rpc_request: Any) -> None:
        method = rpc_request[0]
        if method in STEP_METHODS and self._loaded:
            super()._execute_worker_rpc(rpc_request)
            return
        # A script's own methods may take longer than the timeout of a step.
        self._entry.state("loading")
        WorkerProc._execute_worker_rpc(self, rpc_request)
        if method == LAST_OF_LOADING:
            self._has_loaded()
        elif self._loaded:
            self._entry.state("ready")

    def run(self) -> None:
        """Run the driver's messages until it sends stop; the script's objects are not frozen."""
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
    """Load the shard and run the driver's messages, in the background."""

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
        """`own` is the channel to the driver if this rank drives a replica."""
        self._config, self._spec, self._me, self._store, self._env = vllm_config, spec, me, store, env
        self._link, self._own = link, own
        self._loaded = threading.Event()
        self._problem: BaseException | None = None
        # A daemon thread: Python joins other threads before it calls the functions registered with atexit.
        self._thread = threading.Thread(target=self._run, name="spmd-shard", daemon=True)
        self.own_calls: dict[int, OwnCall] = {}
        """By the number of the call; each one is removed when it is run."""
        self.worker: Any = None
        """vLLM's worker, from the end of `load` until the thread ends."""

    def load(self) -> None:
        """Start the thread, and return when the shard is loaded. Raises the thread's exception."""
        self._thread.start()
        self._loaded.wait()
        if self._problem is not None:
            raise self._problem

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the driver stops the shard; return False after `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the shard's thread."""
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
                loaded=self._loaded.set,
                own_calls=self.own_calls,
            )
            self.worker = shard.worker
            torch.set_num_threads = set_num_threads  # vLLM's CPU worker has replaced it for the whole process
            check_layout(self._spec, self._me)
            shard.run()
        except BaseException as problem:
            self._problem = problem
            if self._loaded.is_set():
                traceback.print_exc()
                self._link.failed(f"the shard's thread failed: {type(problem).__name__}: {problem}")
        finally:
            self.worker = None
            self._loaded.set()

    def _place(self) -> None:
        """Bind this thread, and those that it starts, to the rank's share of the cores."""
        mine = cores.machine_share(self._spec.cluster, self._me, sorted(os.sched_getaffinity(0)))
        if mine:
            os.sched_setaffinity(0, mine)
        environ = dict(os.environ)
        cores.prepare_environ(self._env, environ)
        threads = min(int(environ[cores.THREADS]), max(len(mine), 1))
        torch.set_num_threads(threads)
