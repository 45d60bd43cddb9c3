"""Failure detection: one watcher process per node, its members, and the root cause of a failed job.

Uses the standard library only, so that a watcher starts in well under 0.1 s and stays small.
"""

from spmd_serve.liveness.client import WatcherLink, keep_answering
from spmd_serve.liveness.protocol import End, RootCause, WatchConfig
from spmd_serve.liveness.spawn import start_watcher, watcher_address
from spmd_serve.liveness.status_table import NullStatusEntry, StatusEntry

__all__ = [
    "End",
    "NullStatusEntry",
    "RootCause",
    "StatusEntry",
    "WatchConfig",
    "WatcherLink",
    "keep_answering",
    "start_watcher",
    "watcher_address",
]
