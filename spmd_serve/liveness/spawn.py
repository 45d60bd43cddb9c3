"""Starting a node's watcher: a fresh interpreter with the standard library only.

A fork would share the memory, threads and descriptors that the caller has by then. In a script these may be
torch, a CUDA context and gigabytes of weights, and a child forked beside threads may deadlock. A fresh
interpreter takes about 0.06 s to start, and serves every caller alike.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from spmd_serve.errors import SpmdError
from spmd_serve.liveness.cleanup import remove_scratch, remove_shared
from spmd_serve.liveness.procfs import started_ticks
from spmd_serve.liveness.status import socket_name
from spmd_serve.system.process import open_pidfd, outlive_parent, set_process_name

_IGNORED = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "TTIN", "TTOU", "PIPE", "ALRM")
_RETRY_INTERVAL_S = 0.02


def watcher_address(agent_pid: int, restart_count: int) -> str:
    """Return the abstract socket name of this node's watcher in this round, known to all of its ranks.

    The name contains the pid namespace and the agent's start time, because a pid alone is not unique: agents
    in containers on the host's network share a network namespace but may have the same pid, and pids are
    reused.
    """
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"@spmd-serve-{os.getuid()}-{namespace}-{agent_pid}-{started_ticks(agent_pid)}-{restart_count}"


def start_watcher(
    agent_pid: int,
    restart_count: int,
    *,
    watch_agent: bool = True,
    rank_timeout: float = 10.0,
    grace_s: float = 2.0,
    deadline_s: float = 10.0,
) -> str:
    """Start this node's watcher and return its address, at which it can be reached from now on.

    Call it once per node, on local rank 0, before cores are bound.

    Args:
        agent_pid: torchrun's agent, or the calling process in a run without torchrun.
        restart_count: how often the agent has restarted its ranks.
        watch_agent: whether the end of the agent's process is a failure of the job.
        rank_timeout, grace_s: see WatchConfig, which replaces them later.
        deadline_s: seconds to wait for the exit of the watcher of the round before.

    Raises:
        SpmdError: the address is still in use after `deadline_s` seconds.
    """
    address = watcher_address(agent_pid, restart_count)
    listener = _bind(address, time.monotonic() + deadline_s)
    parent = os.getpid()
    # Opened here, so that the descriptors refer to the right processes even if these end at once.
    parent_fd = os.pidfd_open(parent)
    agent_fd = open_pidfd(agent_pid) if watch_agent else None
    agent = None if agent_fd is None else (agent_pid, agent_fd)
    descriptors = [listener.fileno(), parent_fd, *([] if agent_fd is None else [agent_fd])]
    arguments = [listener.fileno(), (parent, parent_fd), agent, restart_count, rank_timeout, grace_s, address]
    root = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import run_watcher; run_watcher()"
    options = ["-I", "-S", *(f"-W{option}" for option in sys.warnoptions)]
    child = subprocess.Popen(
        [sys.executable, *options, "-c", program, json.dumps(arguments)],
        # A reader of the rank's output must not wait for the watcher's exit. Errors go to the rank's stderr.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        # Signals for the rank's process group (Ctrl-C, torchrun's killpg) must not reach the watcher.
        process_group=0,
    )
    child.returncode = 0  # the watcher outlives this process, about which Popen would warn
    listener.close()
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    return address


def run_watcher() -> None:
    """Run the watcher; main program of the interpreter that `start_watcher` starts.

    At the end, remove the files of this round, and those of earlier rounds whose watchers were killed.
    """
    listener_fd, parent, agent, restart_count, rank_timeout, grace_s, address = json.loads(sys.argv[1])
    outlive_parent()
    set_process_name("spmd-watcher")
    for name in _IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    from spmd_serve.liveness.watcher import Watcher

    listener = socket.socket(fileno=listener_fd)
    watcher = Watcher(
        listener, tuple(parent), None if agent is None else tuple(agent), restart_count, rank_timeout, grace_s
    )
    earlier, _, _ = address.rpartition("-")
    for count in range(restart_count):
        remove_scratch(f"{earlier}-{count}")
    try:
        watcher.run()
    finally:
        remove_scratch(address)
        remove_shared(watcher.round_id or "")


def _bind(address: str, deadline: float) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    while True:
        try:
            listener.bind(socket_name(address))
            listener.listen(128)
            return listener
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                listener.close()
                raise SpmdError(f"the watcher cannot listen at {address}: {problem.strerror}") from problem
        time.sleep(_RETRY_INTERVAL_S)
