"""A server under test: started, waited for with a deadline, and ended by its pid whatever happens."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from harness.processes import assert_gone, descendants, kill, wait_exit
from harness.waiting import DeadlineError, wait_until

START_DEADLINE_S = 180.0
STOP_DEADLINE_S = 40.0
LOG_TAIL_LINES = 60
PR_SET_PDEATHSIG = 1

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)


class Server:
    """Runs a command in a session of its own, its output in a file.

    `with` starts it, waits until it is ready, and stops it. It is ready when a log line matches `ready_line`
    and `ready_url` answers 200 (those that are given). Start it from the test's main thread: it dies with the
    thread that started it, so that a killed test run leaves nothing behind.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environ: Mapping[str, str] | None = None,
        ready_url: str | None = None,
        ready_line: str | None = None,
        start_deadline_s: float = START_DEADLINE_S,
        stop_deadline_s: float = STOP_DEADLINE_S,
        gone_deadline_s: float = 5.0,
    ) -> None:
        self.command = list(command)
        self.log = log
        self.environ = dict(os.environ if environ is None else environ)
        self.ready_url = ready_url
        self.ready_line = ready_line
        self.start_deadline_s = start_deadline_s
        self.stop_deadline_s = stop_deadline_s
        self.gone_deadline_s = gone_deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """The exit code (negative: the signal), or None while it runs."""
        return self._started.poll()

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self.returncode is None

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"not started: {self.command}"
        return self._process

    def start(self) -> Self:
        """Starts the command and returns at once: `wait_ready` waits."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self.environ,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return self

    def wait_ready(self) -> Self:
        """Waits for the URL and the line; AssertionError with the log's tail where it ends or is too late."""
        if self.ready_line is not None:
            self.wait_line(self.ready_line, self.start_deadline_s)
        if self.ready_url is not None:
            url = self.ready_url
            self._wait(lambda: answers(url), self.start_deadline_s, f"{url} to answer")
        return self

    def wait_line(self, pattern: str, deadline_s: float) -> re.Match[str]:
        """Waits for a log line that matches the regular expression."""
        compiled = re.compile(pattern, re.MULTILINE)
        return self._wait(lambda: compiled.search(self.text()), deadline_s, f"a line like {pattern!r}")

    def wait_exit(self, deadline_s: float) -> int:
        """Waits for it to end by itself and returns the exit code."""
        if not wait_exit(self.pid, deadline_s):
            raise self._failure(f"waited {deadline_s:g} s in vain for the end")
        return self._started.wait()

    def stop(self) -> int:
        """SIGTERM, SIGKILL after the deadline; then all that it started must be gone too. The exit code."""
        family = descendants(self.pid)
        self._started.send_signal(signal.SIGTERM)
        if not wait_exit(self.pid, self.stop_deadline_s):
            self.kill()
            kill(family)
            raise self._failure(f"had to be killed: SIGTERM did not end it in {self.stop_deadline_s:g} s")
        code = self._started.wait()
        assert_gone(family, self.gone_deadline_s)
        return code

    def kill(self) -> None:
        """SIGKILL for it and all that it has started: the end of a test that is done with it."""
        family = descendants(self.pid)
        self._started.kill()
        self._started.wait()
        kill(family)

    def text(self) -> str:
        """Everything that it has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        return "\n".join(self.text().splitlines()[-LOG_TAIL_LINES:])

    def __enter__(self) -> Self:
        self.start()
        try:
            return self.wait_ready()
        except BaseException:
            self.end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.returncode is None:
            self.stop()
        else:  # a failing test keeps its own error; a server that has ended must still leave nothing
            self.end()

    def end(self) -> None:
        """Stop it if it runs, and end what it may have left; it says nothing of a failure."""
        family = descendants(self.pid)
        with contextlib.suppress(AssertionError):
            if self.returncode is None:
                self.stop()
        kill(family)

    def _wait(self, condition: Callable[[], T | None], deadline_s: float, what: str) -> T:
        try:
            wait_until(lambda: condition() or self.returncode is not None, deadline_s, what)
        except DeadlineError:
            raise self._failure(f"waited {deadline_s:g} s in vain for {what}") from None
        answer = condition()
        if not answer:
            raise self._failure(f"ended with exit code {self.returncode} while waiting for {what}")
        return answer

    def _failure(self, what: str) -> AssertionError:
        return AssertionError(f"{' '.join(self.command)}\n{what}; the end of {self.log}:\n{self.tail()}")


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """Whether a GET of the URL gives 200 now."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return bool(answer.status == 200)
    return False


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
