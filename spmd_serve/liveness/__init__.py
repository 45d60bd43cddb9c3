"""Who of the job is alive: a watcher per host, its members, and the verdict on who was first to fail.

Stdlib only, so that a watcher is forked before anything heavy is imported.
"""

from spmd_serve.liveness.client import WatcherLink, keep_answering
from spmd_serve.liveness.protocol import End, RootCause, WatchConfig
from spmd_serve.liveness.spawn import spawn_watcher, start_watcher, watcher_address
from spmd_serve.liveness.status_table import NullStatusEntry, StatusEntry

__all__ = [
    "End",
    "NullStatusEntry",
    "RootCause",
    "StatusEntry",
    "WatchConfig",
    "WatcherLink",
    "keep_answering",
    "spawn_watcher",
    "start_watcher",
    "watcher_address",
]
