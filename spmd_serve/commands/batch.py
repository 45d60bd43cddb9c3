"""``spmd_serve batch``: the launch of `serve`, with a file of requests in the place of the HTTP door."""

import argparse
import asyncio
import os

from spmd_serve.batch import BatchOptions, Launch, Prepared, finish_batch, prepare, run_batch_with_engine
from spmd_serve.batch.fingerprint import answer_flags
from spmd_serve.batch.outputs import take_stdout
from spmd_serve.commands.startup import agree, engine_config, job_spec, print_table, run_shard
from spmd_serve.config.flags import PreparsedArgs
from spmd_serve.errors import ExitCode, SpmdError, Stopped, UsageError
from spmd_serve.job.driver_process import end, start_child
from spmd_serve.job.job import Job
from spmd_serve.job.probe_port import open_probes
from spmd_serve.job.state import JobEvent
from spmd_serve.liveness.procfs import started_ticks
from spmd_serve.rendezvous.store import FOREVER_S, answered
from spmd_serve.system.network import host_name
from spmd_serve.system.report import report
from spmd_serve.system.signals import ignore_ending_signals


class BatchJob(Job):
    """A job that has not done what it was started for when it ends early."""

    early_end = Stopped("the batch was stopped before its end: run the same command again to go on")
    may_restart = False
    """Whether one of the agents may start its ranks again."""

    def exit_code(self, code: int) -> int:
        """torchrun takes all but 0 for a failure, and starts the job again where it may.

        A finished run must not be answered by that, so failed lines have a code of their own only without.
        """
        return ExitCode.OK if code == ExitCode.LINES_FAILED and self.may_restart else code


def batch(early: PreparsedArgs) -> int:
    """Answer a file of requests; returns the exit code (see `final_exit_code`)."""
    if early.wants_help:
        return print_help(early)
    if early.flags.lb != "internal":
        raise UsageError(
            f"--lb {early.flags.lb} is about HTTP endpoints, and batch has none: leave it out (lines go to "
            "all replicas)"
        )
    take_stdout()  # ranks share it, and one of them may write answers there
    fork_engines = "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    job = BatchJob.enter(early.flags)
    with job.reported():
        open_probes(job)
        args, layout = agree(job, early, BatchOptions.add_to)
        options = BatchOptions.from_namespace(args)
        prepared = open_files(job, args, options)
        if is_complete(job, prepared):
            return final_exit_code(job, options, finish(job, prepared))
        spec = job_spec(job, layout)
        config = engine_config(job, args)
        child = None
        if prepared is not None:
            files = prepared

            def body() -> int:
                return run_in_child(args, options, files)

            print_table(spec, {})
            child = start_child(job, args, spec, "batch run", body, fork_engines)
        run_shard(job, config, spec)
        return final_exit_code(job, options, end(job, child, args.shutdown_timeout))


def print_help(early: PreparsedArgs) -> int:
    """All flags: ours and the batch's first, then vLLM's."""
    from spmd_serve.engine.config import make_parser

    make_parser(BatchOptions.add_to).parse_args(list(early.rest))
    return ExitCode.OK


def open_files(job: BatchJob, args: argparse.Namespace, options: BatchOptions) -> Prepared | None:
    """On rank 0: open the input, lock the output, compare both with what an earlier run left.

    A download, or a terabyte to compare, takes as long as it takes; the others wait.
    """
    from spmd_serve.engine.config import make_parser

    store, key = job.membership.store, "batch/may-restart"
    if job.env.restart_count < job.env.max_restarts:
        answered(lambda: store.add(key, 1))
    prepared = None
    with job.voting("the batch's files", FOREVER_S):
        if job.membership.me.rank == 0:
            agent = job.env.agent_pid
            launch = Launch(f"{host_name()}:{agent}:{started_ticks(agent)}", job.env.restart_count > 0)
            defaults = {action.dest: action.default for action in make_parser(BatchOptions.add_to)._actions}
            prepared = prepare(options, answer_flags(vars(args), defaults), launch)
    # Each agent counts restarts for itself, and all ranks must end alike. The vote above is a barrier.
    job.may_restart = answered(lambda: store.add(key, 0)) > 0
    return prepared


def is_complete(job: Job, prepared: Prepared | None) -> bool:
    """Whether an earlier run has answered every line; all ranks know, as none needs to load a model then."""
    from spmd_serve.rendezvous.join import get_json, put_json

    store, key = job.membership.store, "batch/complete"
    if prepared is not None:
        put_json(store, key, prepared.is_complete)
    return bool(get_json(store, key, job.flags.join_timeout, "the state of the output", "rank 0", job.say))


def finish(job: Job, prepared: Prepared | None) -> int:
    """Nothing is left to ask: sort, upload and sum up on rank 0, then leave together."""
    from spmd_serve.rendezvous.join import get_json, leave_together, put_json

    store, key = job.membership.store, "batch/finished"
    if prepared is None:
        code = int(get_json(store, key, FOREVER_S, "the sorted and uploaded output", "rank 0", job.say))
    else:
        code = asyncio.run(finish_batch(prepared))
        put_json(store, key, code)
    job.life.apply(JobEvent.LOADED)
    job.end_code = code
    leave_together(store, "batch/told", len(job.membership.cluster.ranks))  # or some take the end for early
    if prepared is None:
        job.leave_together(job.flags.join_timeout)
    else:
        job.announce_end(code)
    return code


def final_exit_code(job: BatchJob, options: BatchOptions, code: int) -> int:
    """What this rank ends with after its part of the run, and the cause for torchrun's summary."""
    exit_code = job.exit_code(code)
    if code == ExitCode.STOPPED:
        report(SpmdError("stopped before the end of the input: see the log above"), quiet=True)
    elif code == ExitCode.LINES_FAILED:
        failed = SpmdError(f"all lines are in {options.destination}, some of them with an error")
        if exit_code == code:
            report(failed, quiet=True)
        else:
            job.say(f"{failed}: exit code 0 all the same, or torchrun would start the finished run again")
    return exit_code


def run_in_child(args: argparse.Namespace, options: BatchOptions, prepared: Prepared) -> int:
    """In rank 0's child: vLLM's engine client over our executor, then line by line."""
    import uvloop

    from spmd_serve.batch.handlers import open_engine, start_metrics

    async def run() -> int:
        start_metrics(options, args)
        async with open_engine(args) as engine_client:
            try:
                return await run_batch_with_engine(engine_client, args, options, prepared=prepared)
            finally:
                # All is written. A signal while the engine ends must not take the run's code with it.
                ignore_ending_signals()

    return int(uvloop.run(run()))
