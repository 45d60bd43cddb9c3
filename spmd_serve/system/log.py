"""Our log lines: on stderr, one handler of our own, no other logger touched."""

import contextlib
import logging
import sys


def say(text: str) -> None:
    """A line to stderr now. A full disk or a closed pipe behind it must not keep a process from ending."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def set_up() -> None:
    """Show INFO and above of ``spmd_serve.*`` on stderr; harmless when called again."""
    logger = logging.getLogger("spmd_serve")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("spmd_serve: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
