"""The driver's side: vLLM's scheduler calls it, it broadcasts each batch to the ranks of its replica."""

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import vllm.envs as envs

from spmd_serve.config.job_spec import ADDITIONAL_CONFIG_KEY, JobSpec
from spmd_serve.engine.driver_channel import DriverChannel
from spmd_serve.engine.driver_watch import DriverWatch
from spmd_serve.engine.vllm_compat import MultiprocExecutor
from spmd_serve.errors import UsageError

logger = logging.getLogger(__name__)

STEP = "execute_and_sample"
"""Worker method that runs execute_model and sample_tokens in one go (see `engine.shard`)."""


class TorchrunExecutor(MultiprocExecutor):
    """Drives one replica's ranks, which torchrun started; see ``distributed_executor_backend`` in vLLM.

    Everything about batches in flight, futures and output aggregation is `MultiprocExecutor`'s; what
    differs is that no worker is started here, how messages travel, and that a step without grammar
    bitmask is one message instead of two.
    """

    supports_pp = True

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, monitor_workers=False)

    def _init_executor(self) -> None:
        self._finalizer = weakref.finalize(self, self.shutdown)
        self.is_failed = False
        self.shutting_down = False
        self.failure_callback: Callable[[], None] | None = None
        self._one_message_step: Future[Any] | None = None
        self._get_parallel_sizes()
        spec, replica = self._place()
        self.workers: list[Any] = []  # what vLLM's own shutdown and monitor look at
        self._spec = spec
        self._replica = replica
        self._watch, self._channel = self._open_channel()
        self.rpc_broadcast_mq: Any = self._channel.outbox
        self.response_mqs: list[Any] = self._channel.replies
        self.futures_queue: deque[Any] = deque()
        self.output_rank = self._get_output_rank()
        assert spec.layout.output_rank(replica) == spec.layout.first_rank(replica) + self.output_rank
        self._channel.start_heartbeat()
        self._post_init_executor()

    def _place(self) -> tuple[JobSpec, int]:
        """The job, and the replica that this executor drives."""
        plain = (self.vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY)
        if plain is None:
            raise UsageError("TorchrunExecutor runs only under `torchrun -m spmd_serve` or spmd_serve.LLM")
        spec = JobSpec.from_json(plain)
        return spec, spec.first_replica + self.parallel_config.data_parallel_index

    def _open_channel(self) -> tuple[Any, DriverChannel]:
        """The line to this host's watcher, and the ways to all ranks once these are loaded."""
        watch = DriverWatch.open(self._spec, self._replica, on_failure=self._fail)
        channel = DriverChannel(self._spec, self._replica, watch.link.entry)
        channel.open()
        channel.replies = watch.follow(channel.replies, self._spec.layout.replica_ranks(self._replica))
        return watch, channel

    def _fail(self, cause: str) -> None:
        """The job lost somebody: tell the engine core, so that clients get an error at once."""
        if self.shutting_down or self.is_failed:
            return
        self.is_failed = True
        callback, self.failure_callback = self.failure_callback, None
        if callback is not None:
            callback()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run a batch; without grammar bitmask also sample, by the same message."""
        if scheduler_output.has_structured_output_requests:
            self._one_message_step = None
            return super().execute_model(scheduler_output, non_block)
        future = self.collective_rpc(
            STEP,
            args=(scheduler_output,),
            unique_reply_rank=self.output_rank,
            non_block=True,
            timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            kv_output_aggregator=self.kv_output_aggregator,
            ec_output_aggregator=self.ec_output_aggregator,
        )
        self._one_message_step = future
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The sampled tokens of the batch that was executed last (already on their way, or asked for now)."""
        future, self._one_message_step = self._one_message_step, None
        if future is None:
            return super().sample_tokens(grammar_output, non_block)
        return future if non_block else future.result()

    def collective_rpc(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As in vLLM; a callable travels as code, so the operator must have allowed that."""
        if not isinstance(method, str) and not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            raise ValueError(
                "collective_rpc with a callable sends code to all ranks: pass the name of a worker method "
                "(see --worker-extension-cls), or set VLLM_ALLOW_INSECURE_SERIALIZATION=1 on every node"
            )
        return super().collective_rpc(method, *args, **kwargs)

    def determine_available_memory(self) -> list[int]:
        """Bytes free for KV cache on each rank; vLLM takes the smallest, the log says whose that is."""
        sizes: list[int] = super().determine_available_memory()
        smallest = min(range(len(sizes)), key=sizes.__getitem__)
        info = self._spec.cluster.ranks[self._spec.layout.first_rank(self._replica) + smallest]
        logger.info(
            "KV cache memory: rank %d on %s has the least, %.2f GiB (the most: %.2f GiB); it decides for all",
            info.rank,
            info.hostname,
            sizes[smallest] / 2**30,
            max(sizes) / 2**30,
        )
        return sizes

    def compile_or_warm_up_model(self) -> None:
        super().compile_or_warm_up_model()
        if self.parallel_config.pipeline_parallel_size > 1:
            # vLLM 0.32 skips on CPU with --enforce-eager the warm-up that makes the stages' buffers,
            # and crashes at the first request without them.
            self.execute_dummy_batch()
        self._channel.loaded()

    def shutdown(self) -> None:
        """Send the ranks home (a normal end) or only let go of the channel (after a failure)."""
        if getattr(self, "shutting_down", True):
            return
        self.shutting_down = True
        problem = sys.exc_info()[1]
        normal = not self.is_failed and (problem is None or isinstance(problem, SystemExit))
        self._watch.close(normal)
        self.rpc_broadcast_mq = None
        self.response_mqs = []
        self._channel.close(normal)

    @property
    def threads(self) -> list[threading.Thread]:
        """Threads that this executor started (for tests)."""
        return self._channel.threads
