"""`spmd_serve batch` with a fake engine in vLLM's place, on every rank: `-m tests.support.fake_batch FLAGS`.

All else is the program's own, and so a run starts in seconds. A line's body may say "fails" (its answer is an
error) and "seconds" (how long that takes). `--signalled-end`: SIGTERM comes while the engine ends.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from spmd_serve.batch import BatchLine, BatchOptions, Prepared, handlers, run_batch
from spmd_serve.batch.request_lines import error_output
from spmd_serve.commands import batch as batch_command
from spmd_serve.commands.startup import resolve_layout
from spmd_serve.config.flags import PreparsedArgs, preparse
from spmd_serve.errors import ExitCode, SpmdError
from spmd_serve.job.job import Job
from spmd_serve.job.state import JobEvent
from spmd_serve.system import log
from spmd_serve.system.report import report
from spmd_serve.topology import Layout
from tests.support.batch import good_output

ENGINE_END_S = 0.5
NO_SIZES = {"tensor_parallel_size": None, "pipeline_parallel_size": None, "data_parallel_size": None}


def make_parser(add: Callable[[argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add(parser)
    parser.add_argument("--signalled-end", action="store_true")
    parser.set_defaults(shutdown_timeout=5.0)
    return parser


def agree(
    job: Job, parsed: PreparsedArgs, add: Callable[[argparse.ArgumentParser], None]
) -> tuple[argparse.Namespace, Layout]:
    args, _ = make_parser(add).parse_known_args(parsed.rest)
    return args, resolve_layout(job, NO_SIZES)


def serve_shard(job: Job, *_: object) -> None:
    """The driver says stop at once: now all wait for the end."""
    job.life.apply(JobEvent.LOADED)


@asynccontextmanager
async def engine(args: argparse.Namespace) -> AsyncIterator[None]:
    yield
    if args.signalled_end:
        os.kill(os.getppid(), signal.SIGTERM)  # which tells all ranks
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(ENGINE_END_S)


async def answer(line: BatchLine) -> dict[str, Any]:
    await asyncio.sleep(float(line.body.get("seconds", 0.0)))
    if line.body.get("fails"):
        return error_output(line.custom_id, "it was told to fail", 500)
    return good_output(line)


async def answer_all(
    _: None, args: argparse.Namespace, options: BatchOptions, *, prepared: Prepared
) -> ExitCode:
    return await run_batch(answer, options, prepared=prepared, drain_s=args.shutdown_timeout)


def main(words: list[str]) -> int:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # nothing of vLLM's is to be changed in the child
    config = ModuleType("spmd_serve.engine.config")
    vars(config).update(make_parser=make_parser, apply_executor=lambda *_: None)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(sys.modules, {config.__name__: config}))
        for owner, name, value in (
            (batch_command, "agree", agree),
            (batch_command, "engine_config", lambda *_: None),
            (batch_command, "run_shard", serve_shard),
            (batch_command, "run_batch_with_engine", answer_all),
            (handlers, "open_engine", engine),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        return batch_command.batch(preparse(["batch", *words]))


if __name__ == "__main__":
    log.set_up()
    try:
        code = main(sys.argv[1:])
    except SpmdError as problem:
        report(problem)
        code = problem.exit_code
    print(f"rank {os.environ['RANK']} ends with {code}", file=sys.stderr, flush=True)
    os._exit(code)
