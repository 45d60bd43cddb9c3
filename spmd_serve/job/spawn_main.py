"""The main module of processes that multiprocessing spawns below a driver's child (vLLM's API servers).

From its first moment on such a process must not outlive the one that started it.
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
    """Have this process's spawned children begin with this module.

    multiprocessing would import our ``__main__`` there, but it leaves out every module of that name.
    """
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)
    os.environ[SPAWNER] = str(os.getpid())


def die_after_spawner() -> None:
    """End here if the driver's child has ended before `die_with_parent`, of which the kernel tells nobody."""
    spawner = open_pidfd(int(os.environ[SPAWNER]))
    if spawner is None or has_ended(spawner):
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.close(spawner)


if __name__ == "__mp_main__":
    die_with_parent(None)
    die_after_spawner()
    log.set_up()
