"""The threads with which gloo moves a rank's bytes: how many, and where they run."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo

_THREADS = 2
"""Threads of a group that run its operations: what torch takes for a group with a device of its own."""


def share_gloo_device() -> None:
    """From now on gloo groups that say nothing about devices share one; call once, before any group is made.

    Each device has a thread that wakes 100 times a second. vLLM makes more than ten groups on a rank, which
    together would cost an idle rank 2 % of a core.
    """
    own_init = ProcessGroupGloo.__init__
    devices: list[Any] = []

    def init(
        self: ProcessGroupGloo,
        store: Any,
        rank: int,
        size: int,
        options: Any = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if isinstance(options, timedelta):
            options, timeout = None, options
        if options is None:
            devices[:] = devices or _devices()
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout, options._threads = devices, timeout, _THREADS
        own_init(self, store, rank, size, options)

    # On the class itself: torch asks groups that come back from C++ whether they are instances of it.
    ProcessGroupGloo.__init__ = init  # type: ignore[assignment, method-assign]


def free_gloo_threads(cores: Sequence[int]) -> None:
    """Let the threads of all gloo groups of this process run on any of `cores`, wherever the rank computes.

    They inherit the one or few cores to which the rank is bound. There each message that arrives takes the
    core from who computes, twice, although another may be idle (measured: docs/benchmarks.md).
    Nothing for an empty list. A thread started a moment ago may not have its name yet, and is missed.
    """
    for task in Path("/proc/self/task").iterdir() if cores else ():
        try:
            if "gloo" in (task / "comm").read_text():
                os.sched_setaffinity(int(task.name), cores)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile


def _devices() -> list[Any]:
    """The devices that torch would have chosen."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
