"""The door: find the subcommand, run it, turn every outcome into one line and an exit code."""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spmd_serve import log
from spmd_serve.errors import ExitCode, SpmdError
from spmd_serve.flags import Early, host_name, parse_early
from spmd_serve.process import die_with_parent


def main(argv: Sequence[str] | None = None) -> None:
    """Run spmd_serve; ends the process with an exit code of `ExitCode`."""
    words = list(sys.argv[1:] if argv is None else argv)
    log.set_up()
    try:
        code = run(parse_early(words))
    except SpmdError as problem:
        report(problem)
        code = problem.exit_code
    except KeyboardInterrupt:
        code = ExitCode.FAILED
    except Exception as problem:
        traceback.print_exc()
        report(problem)
        code = ExitCode.FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of torch's process groups may still wait in C++ for peers that are gone.
    os._exit(int(code))


def run(early: Early) -> int:
    """Hand over to the subcommand; its imports (torch, vLLM) are made only now."""
    if early.wants_version:
        print(f"spmd_serve {own_version()}")
        return ExitCode.OK
    if early.subcommand == "serve":
        from spmd_serve.serve import serve

        return serve(early)
    from spmd_serve.batch import batch

    return batch(early)


def report(problem: BaseException, *, quiet: bool = False) -> None:
    """Print one line (not with `quiet`), and leave it as the cause to torchrun's summary (error file)."""
    rank = os.environ.get("RANK")
    where = f"rank {rank} on {host_name()}" if rank is not None else host_name()
    if isinstance(problem, SpmdError) and not quiet:
        print(f"spmd_serve: {where}: error: {problem}", file=sys.stderr, flush=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is not None:
        text = (
            str(problem) if isinstance(problem, SpmdError) else "".join(traceback.format_exception(problem))
        )
        extra = {"py_callstack": f"{where}: {text}", "timestamp": str(int(time.time()))}
        try:
            Path(error_file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        except OSError as unwritable:
            print(f"spmd_serve: {where}: no error file for torchrun: {unwritable}", file=sys.stderr)


def own_version() -> str:
    """The installed version of spmd_serve."""
    try:
        return version("spmd-serve")
    except PackageNotFoundError:
        return "0 (not installed)"


def run_as_spawned_child() -> None:
    """Called when multiprocessing re-imports our main module in a spawned child (vLLM's engine core and

    API servers): from its first moment on the child must not outlive the process that started it.
    """
    die_with_parent(None)
    log.set_up()
