"""The command line: run the subcommand, and turn each outcome into an exit code and at most one line."""

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
    """Run spmd_serve and exit with a code of `ExitCode`."""
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
        with contextlib.suppress(OSError, ValueError):  # the disk may be full, or the pipe closed
            stream.flush()
    # Not sys.exit: threads of torch's process groups may still wait in C++ for peers that are gone.
    os._exit(int(code))


def run(preparsed: PreparsedArgs) -> int:
    """Run the subcommand and return its exit code. torch and vLLM are imported only here."""
    if preparsed.wants_version:
        print(f"spmd_serve {own_version()}")
        return ExitCode.OK
    if preparsed.subcommand == "serve":
        from spmd_serve.commands.serve import serve

        return serve(preparsed)
    from spmd_serve.commands.batch import batch

    return batch(preparsed)


def own_version() -> str:
    """Return the installed version of spmd_serve."""
    try:
        return version("spmd-serve")
    except PackageNotFoundError:
        return "0 (not installed)"
