"""How a watcher comes to life: forked by local rank 0 before anything heavy is imported."""

import contextlib
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spmd_serve.errors import SpmdError
from spmd_serve.liveness.cleanup import remove_scratch, remove_shared
from spmd_serve.liveness.procfs import started_ticks
from spmd_serve.liveness.status import socket_name
from spmd_serve.system.process import open_pidfd, outlive_parent, set_process_name

if TYPE_CHECKING:
    from spmd_serve.liveness.watcher import Watcher

_IGNORED = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "TTIN", "TTOU", "PIPE", "ALRM")
_AGAIN_S = 0.02


def watcher_address(agent_pid: int, restart_count: int) -> str:
    """Where this host's watcher of this round listens: an abstract socket name that all of its ranks know.

    Agents that share a network namespace but not a pid namespace (containers on the host's network) may have
    the
    same pid, and a pid comes again: so the namespace and the agent's start time are part of the name.
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
    """Fork this host's watcher; returns its address, at which it can be reached from now on.

    Call it once per host, from the main thread, before torch is imported, threads exist or cores are bound.
    `watch_agent`: the end of the agent is a failure (torchrun's agent; not the shell of a run without
    torchrun).
    `rank_timeout`, `grace_s`: see WatchConfig, which replaces them later. Raises SpmdError when the watcher
    of the round before does not go away within `deadline_s` seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "start_watcher forks, and its child dies with the forking thread: use the main thread"
        )
    address = watcher_address(agent_pid, restart_count)
    listener = _bind(address, time.monotonic() + deadline_s)
    parent = os.getpid()
    # Opened before the fork, so that they stand for the right processes.
    parent_fd = os.pidfd_open(parent)
    agent_fd = open_pidfd(agent_pid) if watch_agent else None
    child = os.fork()
    if child:
        listener.close()
        os.close(parent_fd)
        if agent_fd is not None:
            os.close(agent_fd)
        return address
    status = 70
    try:
        _settle_in({listener.fileno(), parent_fd, *([] if agent_fd is None else [agent_fd])})
        from spmd_serve.liveness.watcher import Watcher

        agent = None if agent_fd is None else (agent_pid, agent_fd)
        watcher = Watcher(listener, (parent, parent_fd), agent, restart_count, rank_timeout, grace_s)
        _run(watcher, address)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever happens here, the caller's code never goes on in this process.
        os._exit(status)


def spawn_watcher(
    anchor_pid: int,
    restart_count: int,
    *,
    watch_agent: bool = True,
    rank_timeout: float = 10.0,
    grace_s: float = 2.0,
    deadline_s: float = 10.0,
) -> str:
    """As `start_watcher`, for a process that has grown: threads, libraries, gigabytes that a fork would keep.

    The watcher is a fresh interpreter. `anchor_pid`: the agent, or without one the calling process.
    """
    address = watcher_address(anchor_pid, restart_count)
    listener = _bind(address, time.monotonic() + deadline_s)
    parent = os.getpid()
    descriptors = [listener.fileno(), os.pidfd_open(parent)]
    agent_fd = open_pidfd(anchor_pid) if watch_agent else None
    if agent_fd is not None:
        descriptors.append(agent_fd)
    numbers = [listener.fileno(), parent, descriptors[1], anchor_pid, -1 if agent_fd is None else agent_fd]
    root = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import run_spawned; run_spawned()"
    words = [*map(str, numbers), str(restart_count), str(rank_timeout), str(grace_s)]
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        process_group=0,
    )
    child.returncode = 0  # it outlives us: Popen must not complain about that
    listener.close()
    for number in descriptors[1:]:
        os.close(number)
    return address


def run_spawned(words: Sequence[str] | None = None) -> None:
    """The main program of `spawn_watcher`'s child."""
    *numbers, rank_timeout, grace_s = sys.argv[1:] if words is None else words
    listener_fd, parent, parent_fd, anchor, agent_fd, restart_count = map(int, numbers)
    _settle_in({listener_fd, parent_fd, agent_fd})
    from spmd_serve.liveness.watcher import Watcher

    listener = socket.socket(fileno=listener_fd)
    agent = None if agent_fd < 0 else (anchor, agent_fd)
    watcher = Watcher(
        listener, (parent, parent_fd), agent, restart_count, float(rank_timeout), float(grace_s)
    )
    _run(watcher, watcher_address(anchor, restart_count))


def _run(watcher: "Watcher", address: str) -> None:
    """Then leave nothing behind, of earlier rounds neither, whose watchers may have been killed."""
    earlier, _, number = address.rpartition("-")
    for count in range(int(number)):
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
                raise SpmdError(f"the watcher can't listen at {address}: {problem.strerror}") from problem
        time.sleep(_AGAIN_S)


def _settle_in(keep: set[int]) -> None:
    """Become a process of its own: nobody's signals, nobody's descriptors, nobody's garbage."""
    outlive_parent()
    set_process_name("spmd-watcher")
    # A group of its own: what is meant for the rank's group (Ctrl-C, torchrun's killpg) does not hit it.
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for name in _IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Objects of the parent that own descriptors must not be collected here: their numbers will be ours.
    gc.freeze()
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in keep:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(number)
    # Whoever reads the rank's output must not have to wait for our end. Errors go where the rank's go.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    os.close(nothing)
