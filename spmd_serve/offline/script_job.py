"""A script as a job: the same watcher, rendezvous and votes as serving, but the script stays in charge.

No signal handler is installed, no child is forked, Ctrl-C is a KeyboardInterrupt as ever. What is added to
the script's process: an exception that nobody catches, or a sys.exit() with a code other than 0, is told to
the other ranks, which end with that cause; the loss of another rank ends this process; and at the script's
end an LLM that is still open is closed. A SystemExit raised without sys.exit() counts as a normal end: it is
freed before atexit, and no hook is called for it.
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
from typing import ClassVar, NoReturn, Protocol, Self

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

_VERDICT_S = 4.0
_YIELD_S = 1.0
"""torchrun ends all ranks at the first one's end: let that be the one that failed, after its last words."""
_LAST_S = GRACE_S * 0.75
"""How long a process that ends by its own exception may take for that, before we end it."""


class Open(Protocol):
    """An LLM of the script, until nothing of it is left."""

    closed: bool

    def finish(self, wait_s: float | None) -> None:
        """Wait for the end of one that is closed."""

    def end_with_script(self) -> None:
        """Close it, and wait for its end."""


class ScriptJob(Job):
    """Made once in a process, by its first LLM."""

    as_torchrun = True
    _mine: ClassVar["ScriptJob | None"] = None

    def __init__(self, flags: Flags, env: TorchrunEnv) -> None:
        super().__init__(flags, env)
        self.failing = False
        """This rank ends by an exception of its own."""
        self._exit_code = int(ExitCode.FAILED)
        """What it ends with then."""
        self._judged = threading.Event()
        self._pid = os.getpid()
        self._rounds = 0
        self._open: Open | None = None
        self._first: Membership

    @classmethod
    def of_this_process(cls, flags: Flags) -> "ScriptJob":
        """The process's job; `flags` are those of the first call. Meets all ranks then. Raises SpmdError."""
        if cls._mine is None or cls._mine._pid != os.getpid():
            cls._mine = cls.enter(flags)
        return cls._mine

    @classmethod
    def enter(cls, flags: Flags) -> Self:
        env = TorchrunEnv.read(os.environ)
        job = cls(flags, env)
        if env.launched:
            die_with_parent(env.agent_pid)
        job._open_watcher()
        with job.reported():
            job._join()
        job._first = job.membership
        job._hook_in()
        return job

    @property
    def expects_turns(self) -> bool:
        """No: a script may hold the interpreter lock for as long as it likes."""
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
        hello = {"kind": "rank", "name": f"torchrun rank {env.rank}", "rank": None}
        free = signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL
        self.link = WatcherLink.connect(
            self.watcher, hello, flags.join_timeout, on_root_cause=self._root_cause, stacks=free
        )

    def begin_round(self, wait_s: float) -> None:
        """For each LLM of the script: a part of the store, and a name, of its own.

        Waits `wait_s` seconds for the end of the one before. Raises UsageError when that is not closed.
        """
        if self._open is not None:
            if not self._open.closed:
                raise UsageError("another LLM of this script is open: close() it first")
            self._open.finish(wait_s)
        first, number = self._first, self._rounds
        self._rounds += 1
        if number > 0:
            round_id = f"{first.round_id}n{number}"
            store = connect_store(first.host, first.port, round_id, self.flags.join_timeout)
            self.membership = dataclasses.replace(first, store=store, round_id=round_id)

    def opened(self, llm: Open) -> None:
        """`llm` is ended with the script, unless `finished` is called before."""
        self._open = llm

    def finished(self, llm: Open) -> None:
        """Nothing of `llm` is left."""
        if self._open is llm:
            self._open = None

    def fail(self, problem: BaseException) -> None:
        """Tell all others that this rank ends by `problem`."""
        self.failing = True
        text = " ".join(str(problem).split())
        cause = text if isinstance(problem, SpmdError) else f"{type(problem).__name__}: {text}".rstrip(": ")
        self.link.failed(cause, peer=is_of_a_peer(problem))

    @classmethod
    def _exits(cls, status: object) -> None:
        """Nobody has caught a sys.exit(): where that is no success, all others end as well."""
        job = cls._mine
        if (
            job is None
            or job._pid != os.getpid()
            or status in (None, 0)
            or len(job._first.cluster.ranks) == 1
        ):
            return
        job.failing = True
        job._exit_code = status & 0xFF if isinstance(status, int) else ExitCode.FAILED
        job.link.failed(f"sys.exit({status!r})")

    def await_root_cause(self) -> None:
        """Somebody is gone: wait a moment for the verdict, which knows why and ends this process."""
        if self._judged.wait(_VERDICT_S):
            time.sleep(_VERDICT_S)

    # The script's end.

    def _hook_in(self) -> None:
        shown = sys.excepthook

        def uncaught(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
            shown(kind, problem, trace)
            if os.getpid() == self._pid:
                _flush()
                path = error_file(os.environ)
                if path is not None and not Path(path).exists():  # torchelastic's @record has written one
                    report(problem, quiet=True)
                self.fail(problem)

        sys.excepthook = uncaught
        sys.exit = _exit
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self.failing:
            return  # a forked child of the script, or `_end_after_failure` comes next
        try:
            if self._open is not None:
                self._open.end_with_script()
            self.link.close()
        except BaseException as problem:
            sys.excepthook(type(problem), problem, problem.__traceback__)

    @classmethod
    def _end_after_failure(cls) -> None:
        """After other functions registered with atexit: end without waiting for peers that end as well.

        Threads of torch's process groups and of the shard would hold up, or crash, Python's own way out.
        """
        job = cls._mine
        if job is not None and job.failing and os.getpid() == job._pid:
            logging.shutdown()
            _flush()
            os._exit(job._exit_code)

    def _root_cause(self, root_cause: RootCause) -> None:
        if self.failing:
            timer = threading.Timer(_LAST_S, os._exit, (self._exit_code,))
            timer.daemon = True
            timer.start()
            return
        self._judged.set()
        # The watcher prints the cause, as the host's last line, when its members are gone.
        report(PeerLost(root_cause.cause), quiet=True)
        time.sleep(_YIELD_S)
        _flush()
        os._exit(ExitCode.FAILED)


class _Exit(SystemExit):
    """What sys.exit() raises. Python itself, called by no frame, reads `code` when nobody has caught it.

    Neither sys.excepthook nor functions registered with atexit get to know that, and what to end with.
    """

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:
            ScriptJob._exits(value)
        return value


def _exit(status: object = None, /) -> NoReturn:
    """In the place of sys.exit()."""
    raise _Exit() if status is None else _Exit(status)


# Functions registered later are called earlier; this module is imported before a script's main part runs.
atexit.register(ScriptJob._end_after_failure)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
