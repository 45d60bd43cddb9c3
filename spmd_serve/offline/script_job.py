"""Job of a script: the watcher, rendezvous and votes of serving, without taking over the script's process.

No signal handler is installed, no child is forked, and Ctrl-C raises KeyboardInterrupt as usual. Three things
are added. An uncaught exception, or sys.exit() with a code other than 0, is reported to the other ranks,
which end with that cause. The loss of another rank ends this process. At the end of the script an open LLM is
closed. `raise SystemExit` without sys.exit() is not seen here and counts as a normal end of the script.
"""

import atexit
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Protocol, Self

from spmd_serve.config.flags import Flags
from spmd_serve.errors import ExitCode, PeerLost, SpmdError, UsageError, is_of_a_peer
from spmd_serve.job.job import GRACE_S, Job
from spmd_serve.liveness import RootCause, WatcherLink, start_watcher, watcher_address
from spmd_serve.liveness.cleanup import use_scratch
from spmd_serve.liveness.protocol import STACKS_SIGNAL
from spmd_serve.rendezvous.join import Membership, connect_store
from spmd_serve.system.process import die_with_parent
from spmd_serve.system.report import report
from spmd_serve.system.torchrun_env import TorchrunEnv, error_file

_ROOT_CAUSE_WAIT_S = 4.0
_EXIT_DELAY_S = 1.0
"""torchrun ends all ranks when the first one exits. The delay lets the rank that failed exit first."""
_EXIT_TIMEOUT_S = GRACE_S * 0.75
"""A process that ends with its own exception is ended after this many seconds."""


class OpenLLM(Protocol):
    """An LLM of the script, until all its resources are released."""

    closed: bool

    def await_end(self, wait_s: float | None) -> None:
        """Wait until the closed LLM has released its resources."""

    def end_with_script(self) -> None:
        """Close the LLM, and wait until it has released its resources."""


class ScriptJob(Job):
    """The job of this process, created by its first LLM."""

    as_torchrun = True
    _current: ClassVar["ScriptJob | None"] = None

    def __init__(self, flags: Flags, env: TorchrunEnv) -> None:
        super().__init__(flags, env)
        self.failing = False
        """This rank is ending with an exception of its own, or with a sys.exit() code other than 0."""
        self._exit_code = int(ExitCode.FAILED)
        """The exit code if `failing`."""
        self._exit_status: object = None
        """The argument of the main thread's last sys.exit()."""
        self._root_cause_known = threading.Event()
        self._pid = os.getpid()
        self._rounds = 0
        self._open: OpenLLM | None = None
        self._first: Membership

    @classmethod
    def of_this_process(cls, flags: Flags) -> "ScriptJob":
        """Return the process's job. The first call creates it with `flags` and joins all ranks.

        Raises SpmdError.
        """
        if cls._current is None or cls._current._pid != os.getpid():
            cls._current = cls.enter(flags)
        return cls._current

    @classmethod
    def enter(cls, flags: Flags) -> Self:
        """Connect to the watcher, join all ranks, and install the hooks. Raises SpmdError."""
        env = TorchrunEnv.read(os.environ)
        job = cls(flags, env)
        if env.launched:
            die_with_parent(env.agent_pid)
        job._open_watcher()
        with job.reported():
            job._join()
        job._first = job.membership
        job._install_hooks()
        return job

    @property
    def expects_turns(self) -> bool:
        """False: a script may hold the interpreter lock for any time."""
        return False

    def _open_watcher(self) -> None:
        env, flags = self.env, self.flags
        anchor = env.agent_pid if env.launched else self._pid
        if env.local_rank == 0:
            self.watcher = start_watcher(
                anchor,
                env.restart_count,
                watch_agent=env.launched,
                rank_timeout=flags.rank_timeout,
                grace_s=GRACE_S,
            )
        else:
            self.watcher = watcher_address(anchor, env.restart_count)
        use_scratch(self.watcher, os.environ)
        registration = {"kind": "rank", "name": f"torchrun rank {env.rank}", "rank": None}
        unused = signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL
        self.link = WatcherLink.connect(
            self.watcher,
            registration,
            flags.join_timeout,
            on_root_cause=self._end_with_root_cause,
            stacks=unused,
        )

    def begin_round(self, wait_s: float) -> None:
        """Give the next LLM of the script a round id and a store prefix of its own.

        Waits up to `wait_s` seconds for the end of the previous LLM. Raises UsageError if that is still open.
        """
        if self._open is not None:
            if not self._open.closed:
                raise UsageError("another LLM of this script is open: close() it first")
            self._open.await_end(wait_s)
        self._exit_status = None  # the script has caught an earlier sys.exit()
        first, number = self._first, self._rounds
        self._rounds += 1
        if number > 0:
            round_id = f"{first.round_id}n{number}"
            store = connect_store(first.host, first.port, round_id, self.flags.join_timeout)
            self.membership = dataclasses.replace(first, store=store, round_id=round_id)

    def opened(self, llm: OpenLLM) -> None:
        """Close `llm` at the end of the script, unless `finished` is called before."""
        self._open = llm

    def finished(self, llm: OpenLLM) -> None:
        """Record that `llm` has released its resources."""
        if self._open is llm:
            self._open = None

    def fail(self, problem: BaseException) -> None:
        """Report to all other ranks that this rank ends with `problem`."""
        self.failing = True
        text = " ".join(str(problem).split())
        cause = text if isinstance(problem, SpmdError) else f"{type(problem).__name__}: {text}".rstrip(": ")
        self.link.failed(cause, peer=is_of_a_peer(problem))

    def await_root_cause(self) -> None:
        """After the loss of a rank, wait for the watcher's root cause, which ends this process."""
        if self._root_cause_known.wait(_ROOT_CAUSE_WAIT_S):
            time.sleep(_ROOT_CAUSE_WAIT_S)

    def _install_hooks(self) -> None:
        show, leave = sys.excepthook, sys.exit

        def uncaught(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
            show(kind, problem, trace)
            if os.getpid() == self._pid:
                _flush()
                path = error_file(os.environ)
                if path is not None and not Path(path).exists():  # else torchelastic's @record has written it
                    report(problem, quiet=True)
                self.fail(problem)

        def exit_with(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                self._exit_status = status
            leave(status)

        sys.excepthook = uncaught
        sys.exit = exit_with
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self.failing:
            return  # a forked child of the script, or `_end_after_failure` comes next
        status = self._exit_status
        if status not in (None, 0) and len(self._first.cluster.ranks) > 1:
            # Closing an LLM would wait for the other ranks, which may be waiting for this one.
            self.failing = True
            self._exit_code = status & 0xFF if isinstance(status, int) else ExitCode.FAILED
            self.link.failed(f"sys.exit({status!r})")
            return
        try:
            if self._open is not None:
                self._open.end_with_script()
            self.link.close()
        except BaseException as problem:
            sys.excepthook(type(problem), problem, problem.__traceback__)

    @classmethod
    def _end_after_failure(cls) -> None:
        """End a failed process after all other atexit functions, without waiting for the other ranks.

        The threads of torch's process groups and of the shard can block or crash Python's finalization.
        """
        job = cls._current
        if job is not None and job.failing and os.getpid() == job._pid:
            logging.shutdown()
            _flush()
            os._exit(job._exit_code)

    def _end_with_root_cause(self, root_cause: RootCause) -> None:
        if self.failing:
            timer = threading.Timer(_EXIT_TIMEOUT_S, os._exit, (self._exit_code,))
            timer.daemon = True
            timer.start()
            return
        self._root_cause_known.set()
        # The watcher prints the root cause as the node's last line, when its members are gone.
        report(PeerLost(root_cause.cause), quiet=True)
        time.sleep(_EXIT_DELAY_S)
        _flush()
        os._exit(ExitCode.FAILED)


# atexit calls functions in reverse order: this one, registered at import, runs after those of the script.
atexit.register(ScriptJob._end_after_failure)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
