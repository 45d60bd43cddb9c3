"""Who of the job is alive: a watcher per host, its members, and the verdict on who was first to fail.

Stdlib only, so that a watcher is forked before anything heavy is imported.
"""

from spmd_serve.liveness.board import BoardSlot, NullSlot
from spmd_serve.liveness.link import WatcherLink, keep_answering
from spmd_serve.liveness.records import End, Verdict, WatchConfig
from spmd_serve.liveness.start import spawn_watcher, start_watcher, watcher_address

__all__ = [
    "BoardSlot",
    "End",
    "NullSlot",
    "Verdict",
    "WatchConfig",
    "WatcherLink",
    "keep_answering",
    "spawn_watcher",
    "start_watcher",
    "watcher_address",
]
