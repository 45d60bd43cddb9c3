"""What one LLM of a script consists of on one rank: a shard, an engine if it drives, a line to the others.

Rank 0 is where all meet, and decides; the first rank of every replica drives that with vLLM's in-process
engine. With an LLM for vLLM's external launcher each replica is a world of its own, with its first rank in
the middle.
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
from spmd_serve.offline.call_sync import Lines, OutOfStep, open_lines
from spmd_serve.offline.executor import ScriptExecutor, Seat
from spmd_serve.offline.moe_lockstep import Lockstep
from spmd_serve.offline.options import Options
from spmd_serve.offline.result import Outcome, allow_answers
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
    """Opened by all ranks together; `call` and `close` are collective too."""

    def __init__(self, options: Options, engine: Mapping[str, Any]) -> None:
        """Meet, compare, load, connect. Raises SpmdError, with the same text on every rank, for a mistake."""
        log.set_up()
        allow_answers()
        # The engine core must be in this process; vLLM reads this when the engine is made.
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
        """vLLM's own LLM, on a rank that drives."""
        self.layout = self._agree(engine)
        self.lockstep: Lockstep | None = None
        """For replicas that are no engines of their own."""
        self.config = self._configure(engine)
        replica = self.layout.replica(self.me.rank)
        self.replica = replica
        self.is_driver = self.me.rank == self.layout.first_rank(replica)
        with self._job.reported():
            self._load(engine)
            self._lines = self._connect()
        self._job.opened(self)
        self.supported_tasks = self.call("get_supported_tasks", {}, lambda: self.llm.supported_tasks)

    # Opening.

    def _agree(self, engine: Mapping[str, Any]) -> Layout:
        """The sizes; and nothing must differ between ranks that would make them differ later."""
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
        """vLLM's configuration for this rank's shard; vLLM checks everything that it can without loading."""
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
            seat = Seat(spec, self.replica, own, self.shard, lambda: job.failing)
            backend = ScriptExecutor.bound_to(seat)
            more: dict[str, Any] = self._sizes()
            if together:  # no step before the last one is known
                more["async_scheduling"] = False
            self.llm = vllm.LLM(**{**engine, **more}, distributed_executor_backend=backend)
            if self.lockstep is not None:
                self.lockstep.drive(self.llm.llm_engine)

    def _spec(self) -> JobSpec:
        membership, flags = self._job.membership, self._job.flags
        return JobSpec(
            backend=flags.control_backend,
            lb="external",  # a replica's driver is on the node of its first rank
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
        """Each replica is given its own prompts; unless they run the model together, they don't meet."""
        return self.options.external and self.layout.dp > 1

    def _connect(self) -> Lines:
        membership, layout = self._job.membership, self.layout
        apart = self.own_prompts and self.lockstep is None
        ranks = layout.replica_ranks(self.replica) if apart else range(layout.world_size)
        self._root = ranks[0]
        name = f"meeting/{self.replica if apart else 'all'}"
        key = self._job.key()
        return open_lines(
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
        # The first rank of each host, and rank 1, which knows when rank 0 is the one that is waited for.
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
        """Run a call that every rank makes; returns its result, or raises its error, on every rank.

        `run` is called on ranks that drive; `merge` makes one result of theirs. Without `everywhere` only the
        driver gets the result, others None. `own`: what `run_own` has this rank's shard do. Raises OutOfStep
        when ranks do not make the same call.
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
                self._lines.meet(Call.of(self._number, method, arguments))
            except (OutOfStep, PeerLost) as problem:
                self._problem = problem
                if isinstance(problem, PeerLost):
                    self._job.await_root_cause()
                raise
            part = self._run(run) if self.is_driver else None
            return self._lines.conclude(part, lambda parts: _merged(parts, merge), everywhere).take()
        finally:
            self._busy.release()

    def run_own(self, timeout_s: float | None) -> list[Any]:
        """On a rank that drives, inside `call`: have every shard run its own rank's `own`; their results."""
        results: list[Any] = self.llm.collective_rpc(OWN_CALL, timeout_s, (self._number,))
        return results

    def _run(self, run: Callable[[], Any]) -> Outcome:
        try:
            outcome = Outcome(run())
        except Exception as problem:
            outcome = Outcome(error=problem)
        if self.lockstep is not None:
            self.lockstep.keep_up()
        return outcome

    # Closing.

    def close(self, action: str, wait_s: float | None) -> None:
        """Leave, with all others; `action` tells them how ("has closed the LLM").

        Waits `wait_s` seconds (None: for ever) for the driver's end, which ends our shard. Raises OutOfStep.
        """
        if self.closed:
            return
        self.closed = True
        if self.shard.is_current:  # a garbage collection there
            threading.Thread(target=self._leave, args=(action,), daemon=True).start()
            return
        self._leave(action)
        if wait_s != 0:
            self.finish(wait_s)

    def _leave(self, action: str) -> None:
        self._lines.leave(Call(self._number + 1, action, {}, left=True))
        if self.llm is not None:
            with process_group.kept():
                self.llm.llm_engine.engine_core.shutdown()
            self.llm = None

    def finish(self, wait_s: float | None) -> None:
        """Wait until nothing of it is left in this process. Raises OutOfStep after `wait_s` seconds."""
        # The lines first: their root waits for us to read its last word before it ends the shards.
        late = None if self._lines.await_end(wait_s, self._say) else self._root
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
        """At the script's end: close it, and wait for the others' end, however long their scripts go on."""
        self.close("has ended its script", 0)
        self.finish(None)


def _build(arguments: Mapping[str, Any]) -> Any:
    with refusals():
        return EngineArgs(**arguments, distributed_executor_backend=TorchrunExecutor).create_engine_config(
            UsageContext.LLM_CLASS
        )


def _merged(parts: list[Outcome], merge: Callable[[list[Any]], Any]) -> Outcome:
    for part in parts:
        if part.error is not None:
            return part
    return Outcome(merge([part.value for part in parts]))
