"""All internals of vLLM 0.32 that spmd_serve uses, and the checks that the installed vLLM has them.

Public extension points (``distributed_executor_backend=<class>``, ``additional_config``, endpoint plugins,
the argument parsers) are used directly by other modules. The names imported here are not part of vLLM's
public interface. At every start, and in a test, `check()` names the first one that has changed;
`check_server()` and `check_batch()` do the same for the functions that `server/` and `batch/` call.
"""

import functools
import importlib
import inspect
import multiprocessing
import signal
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Any

import zmq
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.engine import EngineCoreRequestType, async_llm, coordinator, utils
from vllm.v1.engine.coordinator import DPCoordinator, DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor, WorkerProc
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.utils import APIServerProcessManager
from vllm.version import __version__

from spmd_serve.errors import UsageError

__all__ = [
    "Handle",
    "MessageQueue",
    "MultiprocExecutor",
    "WorkerProc",
    "check",
    "check_batch",
    "check_server",
    "count_engines_from",
    "follow_engine_loop",
    "fork_engine_cores",
    "keep_notifications",
    "last_message_bytes",
    "look_again",
    "quieten",
    "run_coordinator",
    "run_coordinators_by",
    "sleep_instead_of_spinning",
]

WRITTEN_FOR = "0.32"

# Class, method, and the parameters that we pass or override.
_RELIED_ON: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (
        WorkerProc,
        "__init__",
        (
            "vllm_config",
            "local_rank",
            "rank",
            "distributed_init_method",
            "input_shm_handle",
            "shared_worker_lock",
            "is_driver_worker",
        ),
    ),
    (WorkerProc, "_init_message_queues", ("input_shm_handle", "vllm_config")),
    (WorkerProc, "_execute_worker_rpc", ("rpc_request",)),
    (WorkerProc, "worker_busy_loop", ()),
    (WorkerProc, "shutdown", ()),
    (MultiprocExecutor, "_init_executor", ()),
    (MultiprocExecutor, "_get_parallel_sizes", ()),
    (MultiprocExecutor, "_get_output_rank", ()),
    (
        MultiprocExecutor,
        "collective_rpc",
        ("method", "timeout", "args", "kwargs", "non_block", "unique_reply_rank", "kv_output_aggregator"),
    ),
    (MultiprocExecutor, "execute_model", ("scheduler_output", "non_block")),
    (MultiprocExecutor, "sample_tokens", ("grammar_output", "non_block")),
    (MultiprocExecutor, "shutdown", ()),
    (MessageQueue, "__init__", ("n_reader", "n_local_reader", "max_chunk_bytes")),
    (MessageQueue, "create_from_handle", ("handle", "rank")),
    (MessageQueue, "enqueue", ("obj", "timeout")),
    (MessageQueue, "dequeue", ("timeout", "indefinite")),
    (MessageQueue, "wait_until_ready", ()),
    (MessageQueue, "shutdown", ()),
    (FutureWrapper, "result", ("timeout",)),
    (EngineCoreProc, "_process_input_queue", ()),
    (EngineCoreProc, "_handle_client_request", ("request_type", "request")),
    (DPCoordinator, "__init__", ("parallel_config",)),
    (DPCoordinatorProc, "run_coordinator", ()),
    (StatLoggerManager, "__init__", ("vllm_config", "engine_idxs")),
    (APIServerProcessManager, "__init__", ("target_server_fn",)),
)


_Functions = tuple[tuple[str, str, tuple[str, ...]], ...]

# Module, function and parameters behind `vllm serve` and `vllm run-batch`, for the processes with drivers.
_SERVER: _Functions = (
    ("vllm.entrypoints.cli.serve", "setup_server", ("args", "reuse_port")),
    ("vllm.entrypoints.cli.serve", "APIServerProcessManager", ("target_server_fn",)),
    ("vllm.entrypoints.cli.serve", "run_multi_api_server", ("args",)),
    (
        "vllm.entrypoints.cli.serve",
        "wait_for_completion_or_failure",
        ("api_server_manager", "engine_manager", "coordinator"),
    ),
    ("vllm.entrypoints.launchers.api_server.entry", "run_server_worker", ("listen_address", "sock", "args")),
    ("vllm.entrypoints.launchers.launcher", "set_ulimit", ()),
    ("vllm.entrypoints.launchers.launcher", "validate_api_server_args", ("args",)),
    ("vllm.v1.utils", "run_api_server_worker_proc", ("listen_address", "sock", "args", "client_config")),
)
_BATCH: _Functions = (
    ("vllm.entrypoints.launchers.api_server.entry", "build_async_engine_client", ("args",)),
    ("vllm.entrypoints.launchers.run_batch", "State", ()),
    ("vllm.entrypoints.launchers.run_batch", "BatchRequestInput", ()),
    ("vllm.entrypoints.launchers.run_batch", "BatchProgressTracker", ()),
    ("vllm.entrypoints.launchers.run_batch", "build_endpoint_registry", ("engine_client", "args")),
    ("vllm.entrypoints.launchers.run_batch", "handle_endpoint_request", ("request", "tracker")),
)


def check() -> None:
    """Raise UsageError that names the first internal that differs from vLLM 0.32."""
    for owner, name, parameters in _RELIED_ON:
        _require(owner, name, parameters)


def check_server() -> None:
    """Check what the API server's process calls; imports vLLM's web part. Raises UsageError."""
    _check_functions(_SERVER)


def check_batch() -> None:
    """Check what the process of a batch run calls. Raises UsageError."""
    _check_functions(_BATCH)


def _check_functions(functions: _Functions) -> None:
    for module, name, parameters in functions:
        _require(importlib.import_module(module), name, parameters)


def _require(owner: type | ModuleType, name: str, parameters: tuple[str, ...]) -> None:
    member = getattr(owner, name, None)
    if member is None:
        raise UsageError(
            f"vLLM {__version__} has no {owner.__name__}.{name}: spmd_serve uses that of "
            f"vLLM {WRITTEN_FOR}; install vllm>=0.32,<0.33"
        )
    missing = set(parameters) - set(inspect.signature(member).parameters) if parameters else None
    if missing:
        raise UsageError(
            f"vLLM {__version__}: {owner.__name__}.{name} no longer takes {', '.join(sorted(missing))}, "
            f"as it did in vLLM {WRITTEN_FOR}; install vllm>=0.32,<0.33"
        )


def fork_engine_cores() -> None:
    """Make vLLM fork its engine cores and their coordinator, as it does on GPUs, instead of spawning them.

    On CPUs vLLM spawns them, because their workers must not inherit OpenMP's threads. Our engine cores start
    no workers, and a forked one does not have to import vLLM again (10 s or more, and the memory).
    """
    for module in (utils, coordinator):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


_take_requests, _handle_request = EngineCoreProc._process_input_queue, EngineCoreProc._handle_client_request


def follow_engine_loop(works: Callable[[], None], waits: Callable[[], None]) -> None:
    """Make this process's engine core call `waits()` before its loop waits for requests, `works()` after.

    One pass of the loop takes requests (it waits while there are none), then makes a step. A call of one of
    the engine's methods counts as waiting, because it may wait for other endpoints without limit.
    """

    @functools.wraps(_take_requests)
    def take(self: EngineCoreProc) -> None:
        waits()
        _take_requests(self)
        works()

    @functools.wraps(_handle_request)
    def handle(self: EngineCoreProc, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type != EngineCoreRequestType.UTILITY:
            works()
        _handle_request(self, request_type, request)
        waits()

    EngineCoreProc._process_input_queue = take
    EngineCoreProc._handle_client_request = handle


run_coordinator = DPCoordinatorProc.run_coordinator
"""The main function of vLLM's coordinator of replicas; DPCoordinator passes its keyword arguments."""


_start_coordinator = DPCoordinator.__init__


def run_coordinators_by(main: Callable[..., None], blocked: Iterable[signal.Signals]) -> None:
    """Make `main(**keywords)` the main function of coordinators; it must be picklable.

    The process starts with the signals `blocked` in all threads, including those that libraries start when
    they are imported.
    """

    @functools.wraps(_start_coordinator)
    def start(self: DPCoordinator, *args: Any, **kwargs: Any) -> None:
        resource_tracker.ensure_running()  # it unblocks SIGTERM when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            _start_coordinator(self, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    DPCoordinator.__init__ = start
    DPCoordinatorProc.run_coordinator = staticmethod(main)


class _ReplicaNumber(int):
    """The index of an engine at its endpoint, which is printed as the number of its replica in the job."""

    first = 0

    def __str__(self) -> str:
        return str(int(self) + self.first)

    def __format__(self, spec: str) -> str:
        return format(int(self) + self.first, spec)


def count_engines_from(first: int) -> None:
    """Number the engines from `first` in this process's metrics and log lines.

    For an endpoint with some of a job's dense replicas, vLLM itself counts from 0.
    """
    _ReplicaNumber.first = first

    class Manager(StatLoggerManager):
        def __init__(
            self, vllm_config: Any, engine_idxs: list[int] | None = None, *args: Any, **kwargs: Any
        ) -> None:
            numbers: list[int] = [_ReplicaNumber(index) for index in engine_idxs or [0]]
            super().__init__(vllm_config, numbers, *args, **kwargs)

    async_llm.StatLoggerManager = Manager


_NOTIFICATIONS = 1000
"""Limit of queued notifications of a ring; far above its number of slots."""


def keep_notifications(queue: MessageQueue) -> None:
    """Make every message of a ring's writer wake its readers; call this before they get its handle.

    The socket of vLLM's writer queues one notification, and ZMQ takes about a millisecond to notice that it
    was sent; notifications in between are dropped. A reader that sleeps then looks again only after 5 s.
    vLLM's readers poll for a second after each message, which hides this. A reader keeps only the last
    notification (ZMQ_CONFLATE), so none accumulate.
    """
    socket = queue._spin_condition.local_notify_socket
    socket.setsockopt(zmq.SNDHWM, _NOTIFICATIONS)  # for addresses that are bound from now on
    queue.handle.local_notify_addr = get_open_zmq_ipc_path()
    socket.bind(queue.handle.local_notify_addr)


def last_message_bytes(queue: MessageQueue) -> int:
    """Return the bytes of the last message that a ring's writer enqueued; 0 if it was too long for a slot.

    Layout of a slot in vLLM 0.32, big-endian: one byte (1: the message went over a socket instead), two bytes
    with the number of parts, then each part after four bytes with its length.
    """
    last = (queue.current_idx - 1) % queue.buffer.max_chunks
    with queue.buffer.get_data(last) as entry:
        if entry[0] == 1:
            return 0
        at, total = 3, 0
        for _ in range(int.from_bytes(entry[1:3], "big")):
            length = int.from_bytes(entry[at : at + 4], "big")
            at, total = at + 4 + length, total + length
        return total


_RECHECK_INTERVAL_MS = 1000


def look_again(queue: MessageQueue) -> None:
    """Make a sleeping reader of a ring look for a message every second, instead of every 5 s.

    libzmq can lose a notification that arrives at the moment when the reader finds none (ZMQ_CONFLATE). This
    was observed for one message in 16,000 on an overloaded machine.
    """
    condition = queue._spin_condition
    wait = condition.wait

    def wait_at_most_a_second(timeout_ms: int | None = None) -> None:
        wait(_RECHECK_INTERVAL_MS if timeout_ms is None else min(timeout_ms, _RECHECK_INTERVAL_MS))

    condition.wait = wait_at_most_a_second


def sleep_instead_of_spinning(queue: MessageQueue) -> None:
    """Make a ring's reader sleep between messages, instead of polling for a second after each one."""
    queue._spin_condition.busy_loop_s = -1.0


def quieten(queue: MessageQueue) -> None:
    """Make a ring's reader sleep at once, instead of polling for a second after the last message.

    Otherwise each heartbeat of an idle job would keep a core busy for a second.
    """
    condition = getattr(queue, "_spin_condition", None)
    if condition is not None:
        condition.last_read = 0.0
