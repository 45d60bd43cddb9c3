"""A batch whose lines are all answered, on every rank, no vLLM: `-m tests.support.batch_job WHAT IN OUT`.

WHAT: "patient": rank 0's work takes longer than any rank waits for others. "stop_in_files", "stop_in_sort":
rank 0 gets SIGTERM while it prepares, or while it sorts.
"""

import argparse
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

from spmd_serve.batch import BatchOptions, prepare
from spmd_serve.batch.journal import Journal
from spmd_serve.commands import batch as batch_command
from spmd_serve.commands.batch import BatchJob, final_exit_code, finish, is_complete, open_files
from spmd_serve.config.flags import Flags
from spmd_serve.errors import SpmdError
from spmd_serve.rendezvous import store, vote
from spmd_serve.system import log
from spmd_serve.system.report import report

WORK_S = 5.0  # longer than a "patient" rank waits for others, which is longer than one is starved
FOREVER_S = 60.0


class TalkingJob(BatchJob):
    """All ranks say what they wait for."""

    def say(self, text: str) -> None:
        log.say(f"rank {self.env.rank}: {text}")


def stop(*_: object) -> None:
    """SIGTERM to this process, whose main thread is busy then, and goes on being so."""
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(FOREVER_S)


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, after a while."""

    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(WORK_S)
        return function(*args, **kwargs)

    return call


def main(what: str, options: BatchOptions) -> int:
    job = TalkingJob.enter(Flags(join_timeout=30.0))
    parsers = ModuleType("spmd_serve.engine.config")  # vLLM's flags take 10 s to import
    vars(parsers)["make_parser"] = lambda add: argparse.ArgumentParser()
    with ExitStack() as patches, job.reported():
        patches.enter_context(mock.patch.dict(sys.modules, {parsers.__name__: parsers}))

        def patch(owner: object, name: str, value: object) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        if what == "patient":
            patch(job, "flags", dataclasses.replace(job.flags, join_timeout=3.0))
            patch(vote, "_LATER_S", 0.1)
            patch(store, "FIRST_WORD_S", 0.1)
            patch(batch_command, "prepare", slow(prepare))
            patch(Journal, "sort", slow(Journal.sort))
        elif what == "stop_in_files":
            patch(batch_command, "prepare", stop)
        elif what == "stop_in_sort":
            patch(Journal, "sort", stop)
        prepared = open_files(job, argparse.Namespace(), options)
        assert is_complete(job, prepared)
        return final_exit_code(job, options, finish(job, prepared))


if __name__ == "__main__":
    log.set_up()
    try:
        code = main(sys.argv[1], BatchOptions(input_file=sys.argv[2], output_file=sys.argv[3], ordered=True))
    except SpmdError as problem:
        report(problem)
        code = problem.exit_code
    print(f"rank {os.environ['RANK']} ends with {code}", flush=True)
    os._exit(code)
