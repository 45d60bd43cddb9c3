"""The main module of processes that multiprocessing spawns below a driver's child (vLLM's API servers).

From its first moment on such a process must not outlive the one that started it.
"""

import importlib.util
import sys

from spmd_serve import log
from spmd_serve.process import die_with_parent


def be_main_of_spawned() -> None:
    """Have this process's spawned children begin with this module.

    multiprocessing would import our ``__main__`` there, but it leaves out every module of that name.
    """
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(__name__)


if __name__ == "__mp_main__":
    die_with_parent(None)
    log.set_up()
