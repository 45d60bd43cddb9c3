"""Limit gloo's threads on a rank, and choose the cores that they run on."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo

_THREADS = 2
"""Threads that run the operations of a group; torch's default for a group with its own device."""


def share_gloo_device() -> None:
    """Make all gloo groups without explicit options share one device; call once, before any group exists.

    Each device has a thread that wakes 100 times a second. vLLM creates more than ten groups on a rank, which
    together would use 2 % of a core while the rank is idle.
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

    # Patch the class itself: torch checks that groups returned from C++ are instances of it.
    ProcessGroupGloo.__init__ = init  # type: ignore[assignment, method-assign]


def free_gloo_threads(cores: Sequence[int]) -> None:
    """Let the threads of all gloo groups of this process run on any of `cores`; do nothing if it is empty.

    They inherit the few cores to which the rank is bound. There each message interrupts the computation
    twice, even if another core is idle (docs/benchmarks.md). A thread that has just started may have no name
    yet; it is not found.
    """
    for task in Path("/proc/self/task").iterdir() if cores else ():
        try:
            if "gloo" in (task / "comm").read_text():
                os.sched_setaffinity(int(task.name), cores)
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended


def _devices() -> list[Any]:
    """Return the devices that torch would choose."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
