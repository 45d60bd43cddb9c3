"""The driver's executor: send each batch of vLLM's scheduler to the ranks of the replica."""

import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import vllm.envs as envs

from spmd_serve.channel.base import Inbox, Outbox
from spmd_serve.config.job_spec import ADDITIONAL_CONFIG_KEY, JobSpec
from spmd_serve.engine.driver_channel import DriverChannel
from spmd_serve.engine.driver_watch import DriverWatch
from spmd_serve.engine.step_worker import StepWorker
from spmd_serve.engine.vllm_compat import MultiprocExecutor
from spmd_serve.errors import UsageError

logger = logging.getLogger(__name__)


class TorchrunExecutor(MultiprocExecutor):
    """Drives the ranks of one replica, which torchrun started (vLLM's ``distributed_executor_backend``).

    vLLM's `MultiprocExecutor` keeps the batches in flight, their futures and the aggregation of outputs. This
    class starts no workers, connects the ranks by our channel, and sends a step without grammar bitmask as
    one message instead of two.

    The path of a step, with vLLM 0.32's part (`vllm/v1/executor/multiproc_executor.py`) in pseudo-code::

        TorchrunExecutor.execute_model(batch)
          MultiprocExecutor.collective_rpc("execute_and_sample", (batch,), unique_reply_rank=r)
            self.rpc_broadcast_mq.enqueue((method, args, kwargs, r))     # DriverOutbox.enqueue
            return a FutureWrapper; its result() does
              status, result = self.response_mqs[r].dequeue()            # AwaitedReplies.dequeue

        on every rank, TorchrunWorkerProc.run()
          WorkerProc.worker_busy_loop(): for ever
            call = self.rpc_broadcast_mq.dequeue(indefinite=True)        # RankInbox.dequeue
            self._execute_worker_rpc(call)                               # TorchrunWorkerProc
              output = getattr(self.worker, method)(*args, **kwargs)     # StepWorker.execute_and_sample
              if r is None or r == self.rank: self.handle_output(output)
                self.worker_response_mq.enqueue((status, output))        # ShmOutbox or ReplySender

    With asynchronous scheduling, `handle_output` passes the output to a thread, which enqueues it. vLLM logs
    an exception of the method and sends it as the output, with a failure status.
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
        self.workers: list[Any] = []  # read by vLLM's shutdown and monitor
        self._spec = spec
        self._replica = replica
        self._watch, self._channel = self._open_channel()
        self.rpc_broadcast_mq: Outbox | None = self._channel.outbox
        self.response_mqs: Sequence[Inbox] = self._channel.replies
        self.futures_queue: deque[Any] = deque()
        self.output_rank = self._get_output_rank()
        assert spec.layout.output_rank(replica) == spec.layout.first_rank(replica) + self.output_rank
        self._channel.start_heartbeat()
        self._post_init_executor()

    def _place(self) -> tuple[JobSpec, int]:
        """Return the job and the number of the replica that this executor drives."""
        plain = (self.vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY)
        if plain is None:
            raise UsageError("TorchrunExecutor runs only under `torchrun -m spmd_serve` or spmd_serve.LLM")
        spec = JobSpec.from_json(plain)
        return spec, spec.first_replica + self.parallel_config.data_parallel_index

    def _open_channel(self) -> tuple[Any, DriverChannel]:
        """Return the connections to the node's watcher and to all ranks, once these have loaded."""
        watch = DriverWatch.open(self._spec, self._replica, on_failure=self._fail)
        channel = DriverChannel(self._spec, self._replica, watch.link.entry)
        channel.open()
        channel.replies = watch.follow(channel.replies, self._spec.layout.replica_ranks(self._replica))
        return watch, channel

    def _fail(self, cause: str) -> None:
        """Report a failure of the job to the engine core, so that clients get an error at once."""
        if self.shutting_down or self.is_failed:
            return
        self.is_failed = True
        callback, self.failure_callback = self.failure_callback, None
        if callback is not None:
            callback()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run a batch on all ranks; without grammar bitmask, also sample by the same message."""
        if scheduler_output.has_structured_output_requests:
            self._one_message_step = None
            return super().execute_model(scheduler_output, non_block)
        future = self.collective_rpc(
            StepWorker.execute_and_sample.__name__,
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
        """Return the sampled tokens of the batch that was executed last; request them if that is not done."""
        future, self._one_message_step = self._one_message_step, None
        if future is None:
            return super().sample_tokens(grammar_output, non_block)
        return future if non_block else future.result()

    def collective_rpc(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a worker method on all ranks, as in vLLM.

        Raises ValueError for a callable, which is sent as code, unless the operator has allowed that.
        """
        if not isinstance(method, str) and not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            raise ValueError(
                "collective_rpc with a callable sends code to all ranks: pass the name of a worker method "
                "(see --worker-extension-cls), or set VLLM_ALLOW_INSECURE_SERIALIZATION=1 on every node"
            )
        return super().collective_rpc(method, *args, **kwargs)

    def determine_available_memory(self) -> list[int]:
        """Return the bytes free for KV cache on each rank; log the rank with the least, which vLLM uses."""
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
        """Compile or warm up the model on all ranks; the replica accepts batches afterwards."""
        super().compile_or_warm_up_model()
        if self.parallel_config.pipeline_parallel_size > 1:
            # vLLM 0.32 skips the warm-up on CPUs with --enforce-eager. It creates the buffers of the pipeline
            # stages, and without them the first request crashes.
            self.execute_dummy_batch()
        self._channel.ready()

    def shutdown(self) -> None:
        """Close the channel; at a normal end, stop the ranks first."""
        if getattr(self, "shutting_down", True):
            return
        self.shutting_down = True
        problem = sys.exc_info()[1]
        normal = not self.is_failed and (problem is None or isinstance(problem, SystemExit))
        self._watch.close(normal)
        self.rpc_broadcast_mq = None
        self.response_mqs = []
        self._channel.close(normal)
