"""``spmd_serve batch``: the launch of `serve`, with a file of requests in place of the HTTP server."""

import argparse
import asyncio
import os

from spmd_serve.batch import BatchOptions, Launch, Prepared, finish_batch, prepare, run_batch_with_engine
from spmd_serve.batch.outputs import take_stdout
from spmd_serve.batch.prepare import answer_flags
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

RESTARTED_KEY = "batch/restarted"


class BatchJob(Job):
    """A job that has not done what it was started for when it ends preparsed."""

    stop_error = Stopped("the batch was stopped before its end: run the same command again to go on")
    may_restart = False
    """Whether any torchrun agent may restart its ranks."""

    def exit_code(self, code: int) -> int:
        """Return 0 for failed lines if torchrun may restart the job, and `code` otherwise.

        torchrun takes every code but 0 for a failure, and would restart a finished run.
        """
        return ExitCode.OK if code == ExitCode.LINES_FAILED and self.may_restart else code


def batch(preparsed: PreparsedArgs) -> int:
    """Answer a file of requests. Return the exit code (see `final_exit_code`)."""
    if preparsed.wants_help:
        return print_help(preparsed)
    if preparsed.flags.lb != "internal":
        raise UsageError(
            f"--lb {preparsed.flags.lb} is about HTTP endpoints, and batch has none: leave it out "
            "(lines go to all replicas)"
        )
    take_stdout()  # ranks share it, and one of them may write answers there
    fork_engines = "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    job = BatchJob.enter(preparsed.flags)
    with job.reported():
        open_probes(job)
        note_restart(job)  # before `agree`, which is a barrier
        args, layout = agree(job, preparsed, BatchOptions.add_to)
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


def print_help(preparsed: PreparsedArgs) -> int:
    """Print all flags: ours and those of `batch` first, then vLLM's."""
    from spmd_serve.engine.config import make_parser

    make_parser(BatchOptions.add_to).parse_args(list(preparsed.rest))
    return ExitCode.OK


def note_restart(job: BatchJob) -> None:
    """Tell rank 0 if torchrun has restarted this rank: rank 0's own agent may be new to the job."""
    if job.env.restart_count > 0:
        answered(lambda: job.membership.store.add(RESTARTED_KEY, 1))


def open_files(job: BatchJob, args: argparse.Namespace, options: BatchOptions) -> Prepared | None:
    """On rank 0: open the input, lock the output, compare both with what an earlier run left.

    The other ranks wait without a deadline: a download or a large comparison may take long.
    """
    from spmd_serve.engine.config import make_parser

    store, key = job.membership.store, "batch/may-restart"
    if job.env.restart_count < job.env.max_restarts:
        answered(lambda: store.add(key, 1))
    prepared = None
    with job.voting("the batch's files", FOREVER_S):
        if job.membership.me.rank == 0:
            agent = job.env.agent_pid
            restarted = job.env.restart_count > 0 or answered(lambda: store.add(RESTARTED_KEY, 0)) > 0
            launch = Launch(f"{host_name()}:{agent}:{started_ticks(agent)}", restarted)
            defaults = {action.dest: action.default for action in make_parser(BatchOptions.add_to)._actions}
            prepared = prepare(options, answer_flags(vars(args), defaults), launch)
    # Each agent counts restarts for itself, and all ranks must end alike. The vote above is a barrier.
    job.may_restart = answered(lambda: store.add(key, 0)) > 0
    return prepared


def is_complete(job: Job, prepared: Prepared | None) -> bool:
    """Return, on all ranks, whether an earlier run has answered every line, so that no model is loaded."""
    from spmd_serve.rendezvous.join import get_json, put_json

    store, key = job.membership.store, "batch/complete"
    if prepared is not None:
        put_json(store, key, prepared.is_complete)
    return bool(get_json(store, key, job.flags.join_timeout, "the state of the output", "rank 0", job.say))


def finish(job: Job, prepared: Prepared | None) -> int:
    """Sort, upload and summarize the complete output on rank 0; then all ranks leave together."""
    from spmd_serve.rendezvous.join import get_json, leave_together, put_json

    store, key = job.membership.store, "batch/finished"
    if prepared is None:
        code = int(get_json(store, key, FOREVER_S, "the sorted and uploaded output", "rank 0", job.say))
    else:
        code = asyncio.run(finish_batch(prepared))
        put_json(store, key, code)
    job.life.apply(JobEvent.LOADED)
    job.end_code = code
    # Otherwise a rank could take the end of the others for an early end.
    leave_together(store, "batch/final-code", len(job.membership.cluster.ranks))
    if prepared is None:
        job.leave_together(job.flags.join_timeout)
    else:
        job.announce_end(code)
    return code


def final_exit_code(job: BatchJob, options: BatchOptions, code: int) -> int:
    """Return the exit code of this rank, and report the cause for torchrun's summary."""
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
    """Run the batch in rank 0's child process, with vLLM's engine client over our executor."""
    import uvloop

    from spmd_serve.batch.handlers import open_engine, start_metrics

    async def run() -> int:
        start_metrics(options, args)
        async with open_engine(args) as engine_client:
            try:
                return await run_batch_with_engine(engine_client, args, options, prepared=prepared)
            finally:
                # All answers are written: a signal while the engine ends must not change the exit code.
                ignore_ending_signals()

    return int(uvloop.run(run()))
