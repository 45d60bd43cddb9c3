"""The checks of vLLM's internals, and the functions that change vLLM's behaviour."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmd_serve.errors import UsageError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

FEW = 2
"""Lost notifications on a busy machine, of 200; half of them would be lost otherwise."""
LOST_S = 4.0
"""A reader that has missed a notification looks again after 5 s."""


@contextmanager
def ring_of(max_chunk_bytes: int) -> Iterator[tuple[Any, Any]]:
    """Both ends of a ring with one reader, which sleeps between messages."""
    from spmd_serve.engine import shm_ring

    out = shm_ring.ShmOutbox(1, max_chunk_bytes)
    inbox = shm_ring.ShmInbox(out.address, 0, busy_poll=False)
    ready = threading.Thread(target=inbox.wait_until_ready, daemon=True)
    ready.start()
    out.wait_until_ready()
    ready.join(LOST_S)
    yield out, inbox
    for end in (inbox, out):
        end.shutdown()


def test_the_installed_vllm_fits() -> None:
    from vllm.version import __version__

    from spmd_serve.engine import vllm_compat

    vllm_compat.check()
    assert __version__.startswith(vllm_compat.WRITTEN_FOR)


def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmd_serve.engine import vllm_compat

    monkeypatch.delattr(vllm_compat.MultiprocExecutor, "_get_output_rank")
    with pytest.raises(
        UsageError, match=r"^vLLM 0\.32.* has no MultiprocExecutor\._get_output_rank: .*install vllm>=0\.32,<"
    ):
        vllm_compat.check()


def test_functions_of_the_drivers_process_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers.api_server import entry

    from spmd_serve.engine import vllm_compat

    vllm_compat.check_server()
    vllm_compat.check_batch()

    async def run_server_worker(address: str, args: Any) -> None: ...

    monkeypatch.setattr(entry, "run_server_worker", run_server_worker)
    with pytest.raises(
        UsageError, match=r"entry\.run_server_worker no longer takes listen_address, sock, as"
    ):
        vllm_compat.check_server()


def test_a_missing_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmd_serve.engine import vllm_compat

    def dequeue(self: Any, patience: float) -> None: ...

    monkeypatch.setattr(vllm_compat.MessageQueue, "dequeue", dequeue)
    with pytest.raises(
        UsageError,
        match=r"MessageQueue\.dequeue no longer takes indefinite, timeout, as it did in vLLM 0\.32",
    ):
        vllm_compat.check()


def test_engine_cores_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import utils

    from spmd_serve.engine import vllm_compat

    monkeypatch.setattr(utils, "get_mp_context", utils.get_mp_context)  # put back afterwards
    vllm_compat.fork_engine_cores()
    assert utils.get_mp_context().get_start_method() == "fork"


def test_a_wrapped_coordinator_passes_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.coordinator import DPCoordinator, DPCoordinatorProc

    from spmd_serve.engine import vllm_compat

    for owner, name in ((DPCoordinator, "__init__"), (DPCoordinatorProc, "run_coordinator")):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # put back afterwards
    vllm_compat.run_coordinators_by(print, ())
    assert DPCoordinatorProc.run_coordinator is print
    vllm_compat.check()


def test_the_loop_of_an_engine_core_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first wait for a request to the next, with vLLM's own loop around it."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

    from spmd_serve.engine import vllm_compat

    for name in ("_process_input_queue", "_handle_client_request"):
        monkeypatch.setattr(EngineCoreProc, name, vars(EngineCoreProc)[name])  # put back afterwards
    seen: list[str] = []
    vllm_compat.follow_engine_loop(lambda: seen.append("works"), lambda: seen.append("waits"))
    vllm_compat.check()

    class Requests(queue.Queue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            seen.append("get")
            return super().get(block, LOST_S)

    class Core(EngineCoreProc):
        """vLLM's, with a step and work of ours."""

        def __init__(self) -> None:
            self.input_queue = Requests()
            self.aborts_queue = queue.Queue[list[str]]()
            self._idle_state_callbacks: list[Any] = []
            self.process_input_queue_block = True
            self.shutdown_state = EngineShutdownState.RUNNING
            self.publish_dp_lb_stats = False

        def has_work(self) -> bool:
            return "request" in seen

        def _invoke_utility_method(self, *_: Any) -> None:
            seen.append("call")

        def add_request(self, *_: Any) -> None:
            seen.append("request")

        def _process_engine_step(self) -> bool:
            seen.append("step")
            raise SystemExit

    core = Core()
    core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
    core.input_queue.put((EngineCoreRequestType.UTILITY, (0, 0, "list_loras", ())))
    core.input_queue.put((EngineCoreRequestType.ADD, (SimpleNamespace(), 0)))
    with pytest.raises(SystemExit):
        core.run_busy_loop()
    wakeup, call = ["get", "works", "waits"], ["get", "call", "waits"]
    request = ["get", "works", "request", "waits"]
    assert seen == ["waits", *wakeup, *call, *request, "works", "step"]


def test_our_subclasses_override_what_exists() -> None:
    from spmd_serve.engine.executor import TorchrunExecutor
    from spmd_serve.engine.vllm_compat import MultiprocExecutor, WorkerProc
    from spmd_serve.engine.worker_proc import TorchrunWorkerProc

    for ours, theirs, names in (
        (
            TorchrunExecutor,
            MultiprocExecutor,
            (
                *("_init_executor", "execute_model", "sample_tokens", "collective_rpc", "shutdown"),
                *("determine_available_memory", "compile_or_warm_up_model"),
            ),
        ),
        (TorchrunWorkerProc, WorkerProc, ("_init_message_queues", "_execute_worker_rpc")),
    ):
        for name in names:
            assert name in vars(ours) and hasattr(theirs, name), name


@pytest.mark.parametrize("attribute", ["busy_loop_s", "last_read"])
def test_a_ring_can_be_quietened(attribute: str) -> None:
    """If these were renamed, `quieten` would silently have no effect."""
    from spmd_serve.engine import vllm_compat

    writer = vllm_compat.MessageQueue(1, 1, max_chunk_bytes=1 << 16)
    reader = vllm_compat.MessageQueue.create_from_handle(writer.export_handle(), 0)
    assert hasattr(reader._spin_condition, attribute)
    vllm_compat.quieten(reader)
    assert reader._spin_condition.last_read == 0.0
    for end in (writer, reader):
        end.shutdown()


def test_a_reader_that_sleeps_is_woken_by_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With messages in quick succession, vLLM's own socket drops the notification of every second one."""
    from spmd_serve.engine import shm_ring

    monkeypatch.setattr(shm_ring, "look_again", lambda queue: None)
    read: queue.SimpleQueue[object] = queue.SimpleQueue()
    lost = 0
    with ring_of(1 << 16) as (out, inbox):

        def reader() -> None:
            while (obj := inbox.dequeue(indefinite=True)) is not None:
                read.put(obj)

        thread = threading.Thread(target=reader, daemon=True)
        thread.start()
        for number in range(200):
            out.enqueue(number)
            asked = time.monotonic()
            assert read.get(timeout=3 * LOST_S) == number
            lost += time.monotonic() - asked > LOST_S
            assert lost <= FEW
        out.enqueue(None)
        thread.join(3 * LOST_S)


def test_a_reader_that_is_not_woken_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ring_of(1 << 16) as (out, inbox):
        monkeypatch.setattr(out._queue._spin_condition, "notify", lambda: None)
        late = threading.Timer(0.2, out.enqueue, ["unheard"])
        late.start()
        asked = time.monotonic()
        assert inbox.dequeue(timeout=3 * LOST_S) == "unheard"
        assert time.monotonic() - asked < LOST_S
        late.join()


def test_size_of_a_message_in_the_ring() -> None:
    """Relies on vLLM's layout of a slot: parts with their lengths, or a mark for a message sent by socket."""
    sizes = {}
    with ring_of(3 << 20) as (out, inbox):
        # From a MiB on a tensor's bytes are a part of their own.
        for length in (0, 1000, 1 << 20, 2 << 20, 4 << 20):
            sizes[length] = out.enqueue(torch.zeros(length, dtype=torch.uint8))
            assert len(inbox.dequeue(timeout=LOST_S)) == length
    assert 0 < sizes[0] < 1000 < sizes[1000] < 2000
    assert [sizes[length] // length for length in (1 << 20, 2 << 20, 4 << 20)] == [1, 1, 0]


def test_engines_below_a_later_endpoint_are_counted_from_its_first_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.engine import async_llm
    from vllm.v1.metrics.loggers import StatLoggerManager

    from spmd_serve.engine.vllm_compat import count_engines_from

    given: list[int] = []

    def init(self: StatLoggerManager, vllm_config: object, engine_idxs: list[int]) -> None:
        given.extend(engine_idxs)

    monkeypatch.setattr(StatLoggerManager, "__init__", init)
    monkeypatch.setattr(async_llm, "StatLoggerManager", StatLoggerManager)
    count_engines_from(2)
    async_llm.StatLoggerManager(None, engine_idxs=[0, 1])
    assert [str(number) for number in given] == ["2", "3"]
    assert f"{given[1]:03d}" == "003"
    assert {0: "found", 1: "too"}[given[1]] == "too", "still the key that vLLM looks up"
