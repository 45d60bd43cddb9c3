"""Our log lines: on stderr, one handler of our own, no other logger touched."""

import logging
import sys


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
