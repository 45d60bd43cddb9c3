"""A running side: waited for, stopped and continued as a whole, looked at, and ended whatever happens."""

import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.load import Shape
from benchmarks.machine import cpu_seconds, label, placement, pss_mib
from benchmarks.sides import Launch
from harness.processes import Process, assert_gone, descendants, kill, look
from harness.server import Server, answers

POLL_S = 0.1
FIRST_ANSWER_S = 300.0
STOP_DEADLINE_S = 40.0
STOP_CHILDREN_S = 10.0


class ServerFailed(Exception):
    """A server ended or did not get ready in time."""


class Running:
    """All processes of one side, on one or several simulated hosts."""

    def __init__(self, name: str, launches: Sequence[Launch], port: int, model: str, log: Path) -> None:
        self.name = name
        self.port = port
        self.model = model
        self.launched = 0.0
        self.warmed: set[Shape] = set()
        self._launches = launches
        self._log = log
        self._parts: list[Server] = []

    def __enter__(self) -> Self:
        self.launched = time.perf_counter()
        try:
            for host, launch in enumerate(self._launches):
                log = self._log.with_suffix(f".{host}.log")
                self._parts.append(Server(launch.command, log, environ=launch.environ).start())
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, deadline_s: float) -> dict[str, float]:
        """Waits for /health and one answer; seconds since launch of both, and the CPU time that it took."""
        while not answers(f"{self.url}/health"):
            self.check()
            if time.perf_counter() - self.launched > deadline_s:
                raise ServerFailed(f"{self.name}: no /health within {deadline_s:g} s\n{self.tails()}")
            time.sleep(POLL_S)
        healthy = time.perf_counter() - self.launched
        self.ask()
        ready = time.perf_counter() - self.launched
        cpu = sum(cpu_seconds(process, reaped=True) for process in self.processes())
        return {"health_s": healthy, "ready_s": ready, "cpu_s": cpu}

    def ask(self) -> None:
        """One small request, answered."""
        body = json.dumps({"model": self.model, "prompt": [1, 2, 3], "max_tokens": 1}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=FIRST_ANSWER_S) as answer:
                json.load(answer)
        except (OSError, ValueError) as error:
            raise ServerFailed(f"{self.name}: a request failed: {error}\n{self.tails()}") from error

    def check(self) -> None:
        """ServerFailed where a part of it has ended."""
        for part in self._parts:
            if part.returncode is not None:
                raise ServerFailed(f"{self.name} ended with exit code {part.returncode}\n{self.tails()}")

    def tails(self) -> str:
        return "\n".join(f"the end of {part.log}:\n{part.tail()}" for part in self._parts)

    def processes(self) -> list[Process]:
        """Every process of it that is alive now, parents first."""
        found = []
        for part in self._parts:
            root = look(part.pid)
            found += [root] if root is not None and root.state not in "ZX" else []
            found += descendants(part.pid)
        return found

    def freeze(self) -> None:
        """SIGSTOP for all: it uses no CPU until `thaw`."""
        stopped: set[int] = set()
        # Twice, for what was started while the first pass ran.
        for _ in range(2):
            for process in self.processes():
                if process.pid not in stopped:
                    process.signal(signal.SIGSTOP)
                    stopped.add(process.pid)

    def thaw(self) -> None:
        """SIGCONT for all, children first, so that no parent sees a child that does not react."""
        for process in reversed(self.processes()):
            process.signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        return sum(cpu_seconds(process) for process in self.processes())

    def memory(self) -> dict[str, Any]:
        """PSS in MiB: of all, and of each process."""
        each = [{"name": label(process), "pss_mib": pss_mib(process)} for process in self.processes()]
        return {"pss_mib": sum(float(str(one["pss_mib"])) for one in each), "processes": each}

    def placement(self) -> list[dict[str, Any]]:
        """On which cores the threads of each process may run."""
        found = []
        for process in self.processes():
            cores, variables = placement(process)
            found.append({"name": label(process), "threads on cores": cores, "variables": variables})
        return found

    def idle(self, seconds: float) -> list[dict[str, Any]]:
        """CPU seconds that each process uses while nothing is asked for."""
        processes = self.processes()
        before = [cpu_seconds(process) for process in processes]
        start = time.perf_counter()
        time.sleep(seconds)
        passed = time.perf_counter() - start
        self.check()
        used = [cpu_seconds(process) - then for process, then in zip(processes, before, strict=True)]
        return [
            {"name": label(process), "cpu_s": cpu, "percent_of_a_core": 100 * cpu / passed}
            for process, cpu in zip(processes, used, strict=True)
        ]

    def stop(self) -> None:
        """Ends all of it: one SIGTERM to each part, SIGKILL for what is left after a while."""
        self.thaw()
        family = self.processes()
        for part in self._parts:
            if part.returncode is None:
                os.kill(part.pid, signal.SIGTERM)
        for part in self._parts:
            with contextlib.suppress(AssertionError):
                part.wait_exit(STOP_DEADLINE_S)
        try:
            assert_gone(family, STOP_CHILDREN_S)  # which kills them where they are still there
        except AssertionError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
        for part in self._parts:
            part.wait_exit(STOP_DEADLINE_S)


def end_all_children() -> None:
    """Ends whatever still descends from this process, by pid: the last resort of a run."""
    for _ in range(3):
        kill(descendants(os.getpid()))
