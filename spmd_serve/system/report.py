"""A process's last words: one line for people, and the same as the cause in torchrun's summary."""

import json
import os
import time
import traceback
from pathlib import Path

from spmd_serve.errors import SpmdError
from spmd_serve.system.log import say
from spmd_serve.system.network import host_name
from spmd_serve.system.torchrun_env import error_file, given_rank


def report(problem: BaseException, *, quiet: bool = False) -> None:
    """Print one line (not with `quiet`), and leave it as the cause to torchrun's summary (error file)."""
    rank = given_rank(os.environ)
    where = f"rank {rank} on {host_name()}" if rank is not None else host_name()
    if isinstance(problem, SpmdError) and not quiet:
        say(f"spmd_serve: {where}: error: {problem}")
    path = error_file(os.environ)
    if path is not None:
        text = (
            str(problem) if isinstance(problem, SpmdError) else "".join(traceback.format_exception(problem))
        )
        extra = {"py_callstack": f"{where}: {text}", "timestamp": str(int(time.time()))}
        try:
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        except OSError as unwritable:
            say(f"spmd_serve: {where}: no error file for torchrun: {unwritable}")
