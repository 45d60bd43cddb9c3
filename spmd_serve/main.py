"""The door: find the subcommand, run it, turn every outcome into one line and an exit code."""

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from spmd_serve.config.flags import PreparsedArgs, preparse
from spmd_serve.errors import ExitCode, SpmdError
from spmd_serve.system import log
from spmd_serve.system.report import report


def main(argv: Sequence[str] | None = None) -> None:
    """Run spmd_serve; ends the process with an exit code of `ExitCode`."""
    words = list(sys.argv[1:] if argv is None else argv)
    log.set_up()
    try:
        code = run(preparse(words))
    except SpmdError as problem:
        report(problem)
        code = problem.exit_code
    except KeyboardInterrupt:
        code = ExitCode.FAILED
    except Exception as problem:
        traceback.print_exc()
        report(problem)
        code = ExitCode.FAILED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # what it goes to may be full or closed
            stream.flush()
    # Not sys.exit: threads of torch's process groups may still wait in C++ for peers that are gone.
    os._exit(int(code))


def run(early: PreparsedArgs) -> int:
    """Hand over to the subcommand; its imports (torch, vLLM) are made only now."""
    if early.wants_version:
        print(f"spmd_serve {own_version()}")
        return ExitCode.OK
    if early.subcommand == "serve":
        from spmd_serve.commands.serve import serve

        return serve(early)
    from spmd_serve.commands.batch import batch

    return batch(early)


def own_version() -> str:
    """The installed version of spmd_serve."""
    try:
        return version("spmd-serve")
    except PackageNotFoundError:
        return "0 (not installed)"
