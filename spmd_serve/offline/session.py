"""One LLM of a script on one rank: its shard, its engine if the rank drives, and its collective calls.

Rank 0 compares the calls of all ranks and sends the result. The first rank of each replica drives the replica
with vLLM's in-process engine. With an LLM for vLLM's external launcher the ranks of each replica synchronize
among themselves, with the replica's first rank as the root.
"""

import gc
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from spmd_serve.channel.in_process import InProcessChannel
from spmd_serve.config.job_spec import JobSpec, leave_steps_to_the_watcher
from spmd_serve.engine import vllm_compat
from spmd_serve.engine.config import refusals
from spmd_serve.engine.executor import TorchrunExecutor
from spmd_serve.engine.worker_proc import place_config
from spmd_serve.errors import PeerLost, SpmdError, UsageError
from spmd_serve.offline import options as given
from spmd_serve.offline import process_group
from spmd_serve.offline.call_check import Call, OwnCall
from spmd_serve.offline.call_sync import CallSync, OutOfStep, open_call_sync
from spmd_serve.offline.executor import ExecutorContext, ScriptExecutor
from spmd_serve.offline.moe_lockstep import Lockstep
from spmd_serve.offline.options import Options
from spmd_serve.offline.result import CallResult, allow_results
from spmd_serve.offline.script_job import ScriptJob
from spmd_serve.offline.worker_thread import OWN_CALL, ShardThread
from spmd_serve.rendezvous.preflight import agree, collect
from spmd_serve.rendezvous.store import FOREVER_S
from spmd_serve.system import cores, log
from spmd_serve.system.busy_poll import may_busy_poll
from spmd_serve.topology import Layout

HEARTBEAT_S = 2.0

_ENGINE_DEFAULTS = {name: field.default for name, field in EngineArgs.__dataclass_fields__.items()}


class Session:
    """Created by all ranks together; `call` and `close` are collective too."""

    def __init__(self, options: Options, engine: Mapping[str, Any]) -> None:
        """Join the ranks, compare their arguments, load the model, and connect the ranks for calls.

        Raises SpmdError, with the same message on every rank.
        """
        log.set_up()
        allow_results()
        # The engine core must run in this process; vLLM reads this when it creates the engine.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.options = options
        self._job = ScriptJob.of_this_process(options.flags)
        self._job.begin_round(options.call_timeout)
        if options.external:
            self._job.say("distributed_executor_backend='external_launcher' is not needed, and ignored")
        self.me = self._job.membership.me
        self._number = 0
        self._busy = threading.Lock()
        self._problem: SpmdError | None = None
        self.closed = False
        self.llm: Any = None
        """vLLM's own LLM, on ranks that drive a replica."""
        self.layout = self._agree(engine)
        self.lockstep: Lockstep | None = None
        """Set if the replicas run the model together (mixture of experts)."""
        self.config = self._configure(engine)
        replica = self.layout.replica(self.me.rank)
        self.replica = replica
        self.is_driver = self.me.rank == self.layout.first_rank(replica)
        with self._job.reported():
            self._load(engine)
            self._call_sync = self._connect()
        self._job.opened(self)
        self.supported_tasks = self.call("get_supported_tasks", {}, lambda: self.llm.supported_tasks)

    # Opening.

    def _agree(self, engine: Mapping[str, Any]) -> Layout:
        """Return the layout, after a check that no argument differs between ranks. Raises UsageError."""
        job, membership = self._job, self._job.membership
        cluster = membership.cluster
        with job.voting("the arguments of LLM()"):
            given.refuse(engine, _ENGINE_DEFAULTS)
            layout = self.options.layout(cluster.ranks_per_node, cluster.hostnames)
            process_group.check_own(membership.me, cluster)
        shown = {
            **engine,
            **dict(self.options.given),
            "outputs_on": self.options.outputs_on,
            "default process group": process_group.describe_own(),
        }
        ignore = ("seed", "disable_log_stats") if self.options.external else ("disable_log_stats",)
        fingerprint = collect(shown, os.environ, str(engine["model"]), ignore=ignore)
        agree(membership.store, membership.me, cluster, fingerprint, job.flags.join_timeout, job.say)
        return layout

    def _configure(self, engine: Mapping[str, Any]) -> Any:
        """Return vLLM's configuration for this rank's shard, checked as far as possible without loading."""
        config = None
        with self._job.voting("the engine's configuration"):
            vllm_compat.check()
            arguments = {**given.engine_only(engine), **self._sizes()}
            config = _build(arguments)
            if config.model_config.is_moe and self.options.given["dp"] not in (None, 1):
                if self.layout.pp > 1:
                    raise UsageError(
                        "data_parallel_size and pipeline_parallel_size above 1 with a mixture-of-experts "
                        "model work in `-m spmd_serve` only: give tensor_parallel_size in a script"
                    )
                config = _build(
                    {**arguments, "data_parallel_size": self.layout.dp, "async_scheduling": False}
                )
        return config

    def _sizes(self) -> dict[str, int]:
        # Replicas of a dense model are independent engines.
        return {
            "tensor_parallel_size": self.layout.tp,
            "pipeline_parallel_size": self.layout.pp,
            "data_parallel_size": 1,
        }

    def _load(self, engine: Mapping[str, Any]) -> None:
        job, membership = self._job, self._job.membership
        spec = self._spec()
        leave_steps_to_the_watcher(spec, os.environ)
        own = InProcessChannel(copies=self.config.max_concurrent_batches > 1) if self.is_driver else None
        job.link.entry.state("loading")
        place_config(self.config, spec, self.me)
        process_group.ensure(self.config, membership.store, self.me, membership.cluster)
        together = self.config.parallel_config.data_parallel_size > 1
        if together:
            self.lockstep = Lockstep([self.layout.first_rank(replica) for replica in range(self.layout.dp)])
        self.shard = ShardThread(self.config, spec, self.me, membership.store, job.env, job.link, own)
        self.shard.load()
        if own is not None:
            context = ExecutorContext(spec, self.replica, own, self.shard, lambda: job.failing)
            backend = ScriptExecutor.bound_to(context)
            more: dict[str, Any] = self._sizes()
            if together:  # a step must not start before the result of the previous one
                more["async_scheduling"] = False
            self.llm = vllm.LLM(**{**engine, **more}, distributed_executor_backend=backend)
            if self.lockstep is not None:
                self.lockstep.drive(self.llm.llm_engine)

    def _spec(self) -> JobSpec:
        membership, flags = self._job.membership, self._job.flags
        return JobSpec(
            backend=flags.control_backend,
            lb="external",  # a replica's driver runs on the node of its first rank
            store_host=membership.host,
            store_port=membership.port,
            round_id=membership.round_id,
            cluster=membership.cluster,
            layout=self.layout,
            watcher=self._job.watcher,
            key_file=flags.control_key_file,
            allow_classes=flags.control_allow_class,
            heartbeat_s=HEARTBEAT_S,
            join_timeout_s=flags.join_timeout,
            step_timeout_s=flags.step_timeout,
            busy_poll=may_busy_poll(membership.cluster, self.me, cores.lent()),
            in_process=True,
        )

    @property
    def own_prompts(self) -> bool:
        """Each replica gets its own prompts from its ranks."""
        return self.options.external and self.layout.dp > 1

    def _connect(self) -> CallSync:
        membership, layout = self._job.membership, self.layout
        apart = self.own_prompts and self.lockstep is None
        ranks = layout.replica_ranks(self.replica) if apart else range(layout.world_size)
        self._root = ranks[0]
        name = f"meeting/{self.replica if apart else 'all'}"
        key = self._job.key()
        return open_call_sync(
            membership.store,
            name,
            [membership.cluster.ranks[rank] for rank in ranks],
            self.me,
            [
                layout.first_rank(replica)
                for replica in range(layout.dp)
                if layout.first_rank(replica) in ranks
            ],
            round_id=membership.round_id,
            key=None if key is None else bytes.fromhex(key),
            timeout_s=self.options.call_timeout,
            join_timeout_s=FOREVER_S,
            say=self._say,
        )

    def _say(self, text: str) -> None:
        # The first rank of each node, and rank 1, which waits if rank 0 is the missing one.
        if self.me.local_rank == 0 or self.me.rank == 1:
            log.say(f"spmd_serve: {text}")

    # Calling.

    def call(
        self,
        method: str,
        arguments: Mapping[str, object],
        run: Callable[[], Any],
        merge: Callable[[list[Any]], Any] = lambda values: values[0],
        everywhere: bool = True,
        own: OwnCall | None = None,
    ) -> Any:
        """Run a call that every rank makes; return its result, or raise its error, on every rank.

        The ranks that drive a replica call `run`; `merge` combines their results. Without `everywhere` only
        the driver gets the result, the others None. `own` is run by this rank's shard (see `run_own`).
        Raises OutOfStep if the ranks do not make the same call.
        """
        if self._problem is not None:
            raise self._problem
        if self.closed:
            raise UsageError(f"{method}(): this LLM is closed")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{method}() while another thread calls this LLM: one call at a time")
        try:
            self._number += 1
            if own is not None:
                self.shard.own_calls[self._number] = own
            try:
                self._call_sync.begin(Call.of(self._number, method, arguments))
            except (OutOfStep, PeerLost) as problem:
                self._problem = problem
                if isinstance(problem, PeerLost):
                    self._job.await_root_cause()
                raise
            part = self._run(run) if self.is_driver else None
            return self._call_sync.finish(part, lambda parts: _merged(parts, merge), everywhere).take()
        finally:
            self._busy.release()

    def run_own(self, timeout_s: float | None) -> list[Any]:
        """On a driver, inside `call`: run each rank's `own` on its shard, and return the results."""
        results: list[Any] = self.llm.collective_rpc(OWN_CALL, timeout_s, (self._number,))
        return results

    def _run(self, run: Callable[[], Any]) -> CallResult:
        try:
            result = CallResult(run())
        except Exception as problem:
            result = CallResult(error=problem)
        if self.lockstep is not None:
            self.lockstep.keep_up()
        return result

    # Closing.

    def close(self, action: str, wait_s: float | None) -> None:
        """Close the LLM together with all ranks; `action` describes the reason ("has closed the LLM").

        Wait up to `wait_s` seconds (None: no limit) until the driver has stopped this rank's shard. Raises
        OutOfStep after that time.
        """
        if self.closed:
            return
        self.closed = True
        if self.shard.is_current:  # called by a garbage collection in the shard's thread
            threading.Thread(target=self._leave, args=(action,), daemon=True).start()
            return
        self._leave(action)
        if wait_s != 0:
            self.await_end(wait_s)

    def _leave(self, action: str) -> None:
        self._call_sync.leave(Call(self._number + 1, action, {}, left=True))
        if self.llm is not None:
            with process_group.kept():
                self.llm.llm_engine.engine_core.shutdown()
            self.llm = None

    def await_end(self, wait_s: float | None) -> None:
        """Wait until this process has released the LLM. Raises OutOfStep after `wait_s` seconds."""
        # The root stops the shards only after this rank has read its last message.
        late = None if self._call_sync.await_end(wait_s, self._say) else self._root
        if late is None and not self.shard.join(wait_s):
            late = self.layout.first_rank(self.replica)
        if late is not None:
            driver = self._job.membership.cluster.ranks[late]
            raise OutOfStep(
                f"{self.me} has closed the LLM, but {driver}, which drives it, has not within {wait_s:g} s"
            )
        self._job.finished(self)
        gc.collect()

    def end_with_script(self) -> None:
        """Close the LLM at the end of the script, and wait without a limit until the other ranks end too."""
        self.close("has ended its script", 0)
        self.await_end(None)


def _build(arguments: Mapping[str, Any]) -> Any:
    with refusals():
        return EngineArgs(**arguments, distributed_executor_backend=TorchrunExecutor).create_engine_config(
            UsageContext.LLM_CLASS
        )


def _merged(parts: list[CallResult], merge: Callable[[list[Any]], Any]) -> CallResult:
    for part in parts:
        if part.error is not None:
            return part
    return CallResult(merge([part.value for part in parts]))
