"""Worker loop: load the shard, then execute the driver's messages until it sends STOP."""

import gc
import logging
import multiprocessing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import vllm.envs as envs
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]
from vllm.platforms import current_platform

from spmd_serve.channel.base import Inbox, Outbox, WorkerCall
from spmd_serve.channel.in_process import InProcessChannel
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.cpu_collectives import complete_cpu_communicator
from spmd_serve.engine.gloo_devices import free_gloo_threads, share_gloo_device
from spmd_serve.engine.step_worker import STEP_METHODS, StepWorker
from spmd_serve.engine.vllm_compat import WorkerProc
from spmd_serve.engine.worker_channel import EndOfJob, RankChannel
from spmd_serve.errors import SpmdError, is_of_a_peer
from spmd_serve.liveness import WatcherLink
from spmd_serve.liveness.cleanup import remove_shared, shared_name
from spmd_serve.system.cores import memory_rivals, parse_cpus
from spmd_serve.topology import RankInfo

logger = logging.getLogger(__name__)

__all__ = [
    "LAST_OF_LOADING",
    "STEP_METHODS",
    "TorchrunWorkerProc",
    "check_layout",
    "open_world",
    "place_config",
    "world_backend",
    "world_device",
]

LAST_OF_LOADING = "compile_or_warm_up_model"
"""The engine core's last call before it accepts requests."""


class TorchrunWorkerProc(WorkerProc):
    """vLLM's WorkerProc in a process that torchrun started, with our channel instead of vLLM's queues.

    `run` enters vLLM's loop; see `TorchrunExecutor` for the path of a step from the driver to here and back.
    """

    worker: StepWorker
    rpc_broadcast_mq: Inbox
    worker_response_mq: Outbox

    def __init__(
        self,
        vllm_config: Any,
        spec: JobSpec,
        me: RankInfo,
        store: TorchStore,
        link: WatcherLink,
        own: InProcessChannel | None = None,
    ) -> None:
        """Load the shard and connect to the driver; `own` is the channel to a driver in this process."""
        self._spec = spec
        self._own = own
        self._store = store
        self._me = me
        self._link = link
        self._entry = link.entry
        self._loaded = False
        if current_platform.is_cpu():
            complete_cpu_communicator()
        layout = spec.layout
        rank_in_replica = me.rank - layout.first_rank(layout.replica(me.rank))
        super().__init__(
            vllm_config=vllm_config,
            local_rank=me.local_rank % layout.replica_size,
            rank=rank_in_replica,
            distributed_init_method=shm_name(spec, me),
            input_shm_handle=None,
            shared_worker_lock=multiprocessing.get_context("spawn").Lock(),
            is_driver_worker=rank_in_replica % layout.tp == 0,
        )
        self.worker = StepWorker(self.worker, self._report_step_failure)

    def _init_message_queues(self, input_shm_handle: Any, vllm_config: Any) -> None:
        channel = RankChannel(
            self._spec, self._me, self._store, self._entry, self._report_lost_channel, self._own
        )
        channel.open()
        self.rpc_broadcast_mq = channel.inbox
        self.worker_response_mq = channel.reply
        self.peer_response_handles: list[Any] = []

    def _report_lost_channel(self, problem: BaseException) -> None:
        self._link.failed(str(problem), peer=is_of_a_peer(problem))

    def _report_step_failure(self, method: str, problem: Exception) -> None:
        text = " ".join(str(problem).split())
        self._link.failed(f"{method} failed: {type(problem).__name__}: {text}", peer=is_of_a_peer(problem))

    def _execute_worker_rpc(self, rpc_request: WorkerCall) -> None:
        if not isinstance(rpc_request.method, str) and not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            # The driver checks this too, but a message from the network may not come from our driver.
            raise SpmdError(
                "the driver sent code to run, which VLLM_ALLOW_INSECURE_SERIALIZATION=1 must allow"
            )
        if not self._loaded:
            # Profiling, compiling and graph capture may take longer than any step.
            super()._execute_worker_rpc(rpc_request)
            if rpc_request.method == LAST_OF_LOADING:
                self._has_loaded()
            return
        self._entry.step_begin()
        try:
            super()._execute_worker_rpc(rpc_request)
        finally:
            self._entry.step_end()

    def _has_loaded(self) -> None:
        self._loaded = True
        # All ranks have opened it by now. Without a name it disappears with the last rank, also after a kill.
        remove_shared(_shared_name(self._spec, self._me))
        # Not earlier: the threads are found by name, and a thread gets its name when it starts to run.
        free_gloo_threads(parse_cpus(self._me.cpus))
        self._entry.state("ready")

    def run(self) -> None:
        """Execute the driver's messages; return when the driver ends the job."""
        self.rpc_broadcast_mq.wait_until_ready()
        self.worker_response_mq.wait_until_ready()
        gc.collect()
        gc.freeze()
        try:
            self.worker_busy_loop()
        except EndOfJob:
            logger.info("rank %d: the driver ended the job", self._me.rank)
            self.shutdown()


def shm_name(spec: JobSpec, me: RankInfo) -> str:
    """Return the `distributed_init_method` of a rank, unique per round, replica and machine.

    vLLM never connects to it, because the default process group exists already. On CPUs with AVX-512, vLLM
    names the ranks' shared memory after the part behind the last colon, and assumes that ranks with the same
    part can share memory.
    """
    return f"env://spmd_serve:{_shared_name(spec, me)}"


def _shared_name(spec: JobSpec, me: RankInfo) -> str:
    return shared_name(spec.round_id, spec.layout.replica(me.rank), me.machine_id)


def place_config(vllm_config: Any, spec: JobSpec, me: RankInfo) -> None:
    """Set the replica and the device, or the share of memory, in the configuration of one rank.

    vLLM's GPU worker uses device ``local_rank + data_parallel_rank_local * PP * TP``. With
    ``local_rank = LOCAL_RANK % (PP*TP)`` and ``data_parallel_rank_local = LOCAL_RANK // (PP*TP)`` this is
    torchrun's LOCAL_RANK, whether a node holds several replicas or a part of one.
    """
    parallel = vllm_config.parallel_config
    replica = spec.layout.replica(me.rank)
    parallel.data_parallel_index = replica
    if spec.layout.dp > 1:
        if vllm_config.model_config.is_moe:
            parallel.data_parallel_rank = replica
        else:
            parallel.reconfigure_for_independent_dp_rank()
    parallel.data_parallel_rank_local = me.local_rank // spec.layout.replica_size
    cache = vllm_config.cache_config
    if current_platform.is_cpu() and cache.kv_cache_memory_bytes is None:
        # In vLLM each rank takes this share of the machine's memory; several ranks would run out of memory.
        cache.gpu_memory_utilization /= memory_rivals(spec.cluster, me)


def open_world(vllm_config: Any, store: TorchStore, spec: JobSpec, me: RankInfo) -> None:
    """Create the default process group, which vLLM then uses.

    Each dense replica has its own group; MoE replicas share one of DP * PP * TP ranks.
    """
    share_gloo_device()
    layout = spec.layout
    shared = vllm_config.parallel_config.data_parallel_size > 1
    replica = layout.replica(me.rank)
    name = "world" if shared else f"world/{replica}"
    seconds = vllm_config.parallel_config.distributed_timeout_seconds
    dist.init_process_group(
        backend=world_backend(),
        store=PrefixStore(name, store),
        rank=me.rank if shared else me.rank - layout.first_rank(replica),
        world_size=layout.world_size if shared else layout.replica_size,
        timeout=timedelta(seconds=seconds) if seconds else None,
        device_id=world_device(me.local_rank),
    )


def world_backend() -> str:
    """Return the backend of the default group; vLLM's split groups need one for device and CPU."""
    backend = str(current_platform.dist_backend)
    if envs.VLLM_DISTRIBUTED_USE_SPLIT_GROUP and backend == "nccl":
        return "cpu:gloo,cuda:nccl"
    return backend


def world_device(local_rank: int) -> torch.device | None:
    """Return the device to bind the default group to if vLLM's split groups need one, else None."""
    if envs.VLLM_DISTRIBUTED_USE_SPLIT_GROUP and current_platform.is_cuda_alike():
        return torch.device(f"cuda:{current_platform.logical_device_id_to_visible_device_id(local_rank)}")
    return None


def check_layout(spec: JobSpec, me: RankInfo) -> None:
    """Assert our layout formula against vLLM's own groups, once they exist."""
    from vllm.distributed.parallel_state import get_dp_group, get_ep_group, get_pp_group, get_tp_group

    layout = spec.layout
    coords = layout.coords(me.rank)
    theirs = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
    assert theirs == (coords.pp, coords.tp), (
        f"rank {me.rank}: our layout says {coords}, vLLM's (pp, tp) {theirs}"
    )
    if get_dp_group().world_size > 1:
        assert get_dp_group().rank_in_group == coords.dp, (
            f"rank {me.rank}: our layout says {coords}, vLLM's dp {get_dp_group().rank_in_group}"
        )
        assert get_ep_group().ranks == layout.expert_ranks(me.rank), (
            f"rank {me.rank}: our layout spreads experts over ranks {layout.expert_ranks(me.rank)}, "
            f"vLLM over {get_ep_group().ranks}"
        )
