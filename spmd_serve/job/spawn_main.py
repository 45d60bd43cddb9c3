"""The main module of processes that multiprocessing spawns below a driver's child (vLLM's API servers).

Such a process must not outlive the process that started it, from its first instruction on.
"""

import importlib.util
import os
import signal
import sys

from spmd_serve.system import log
from spmd_serve.system.process import die_with_parent, has_ended, open_pidfd

SPAWNER = "SPMD_SERVE_SPAWNER"
"""Environment variable: pid of the driver's child."""


def be_main_of_spawned() -> None:
    """Make this module the main module of the children that this process spawns.

    multiprocessing would import our ``__main__`` there, but it skips every module of that name.
    """
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)
    os.environ[SPAWNER] = str(os.getpid())


def die_after_spawner() -> None:
    """Exit if the driver's child ended before `die_with_parent`; the kernel sends no signal then."""
    spawner = open_pidfd(int(os.environ[SPAWNER]))
    if spawner is None or has_ended(spawner):
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.close(spawner)


if __name__ == "__mp_main__":
    die_with_parent(None)
    die_after_spawner()
    log.set_up()
