"""Jobs of real processes to test liveness: nodes with a stand-in for the agent, a watcher and members."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from harness.processes import Process, assert_gone, look
from harness.waiting import wait_until
from spmd_serve.liveness import End, WatchConfig

ROOT = Path(__file__).resolve().parents[2]
ROUND_ID = "0123456789ab"
PATIENCE_S = 20.0
"""Deadline in seconds of waits for events that should come at once; only a failing run reaches it."""
QUIET_S = 60.0
"""Default --rank-timeout of tests: so long that a starved process never counts as silent."""
GRACE_S = 3.0
"""Time for a starved actor to report the root cause before its watcher kills it."""
GONE_S = 15.0


class Actor:
    """A process of the job; `tests.support.liveness_actor` defines its commands."""

    def __init__(self, job: "Job", log: Path) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.support.liveness_actor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                start_new_session=True,  # as torchrun does
            )
        self.pid = self.process.pid
        job.note(self.pid)
        self._events = threading.Condition()
        self._lines: list[dict[str, Any]] = []
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._events:
                self._lines.append(json.loads(line))
                self._events.notify_all()
        with self._events:
            self._ended = True
            self._events.notify_all()

    def _next(self, wanted: Callable[[dict[str, Any]], bool], what: str, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        with self._events:
            while True:
                for line in self._lines:
                    if wanted(line):
                        self._lines.remove(line)
                        return line
                left = deadline - time.monotonic()
                assert left > 0 and not self._ended, f"no {what} from pid {self.pid}: {self.log.read_text()}"
                self._events.wait(left)

    def send(self, command: str, *args: Any) -> None:
        """Send a command without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, args]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = PATIENCE_S) -> Any:
        """Return the answer to the oldest unanswered command; AssertionError if the command raised."""
        line = self._next(lambda line: "event" not in line, "answer", timeout_s)
        assert "problem" not in line, line["problem"]
        return line["answer"]

    def do(self, command: str, *args: Any) -> Any:
        """Send a command and return its answer."""
        self.send(command, *args)
        return self.answer()

    def link(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of its WatcherLink."""
        return self.do("link_call", method, args, kwargs)

    def announce_end(self, end: End | None = None, timeout_s: float = PATIENCE_S) -> bool:
        """Announce the end of a part; return whether all nodes know of the job's end in time."""
        known: bool = self.do("announce_end", asdict(end or End()), timeout_s)
        return known

    def expect(self, event: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for a callback of its link: "root_cause", "drain" or "end"."""
        return self._next(lambda line: line.get("event") == event, event, timeout_s)

    def saw(self, event: str) -> bool:
        """Return whether such a callback has come that no `expect` has consumed."""
        with self._events:
            return any(line.get("event") == event for line in self._lines)

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send a signal; return the time (time.monotonic)."""
        at = time.monotonic()
        os.kill(self.pid, number)
        return at

    def wait_stacks(self) -> None:
        """Wait until the stacks of its threads are in its log; the root cause may be declared before."""
        wait_until(lambda: "hread 0x" in self.log.read_text(), PATIENCE_S, f"the stacks of pid {self.pid}")

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self._reader.join(PATIENCE_S)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


class Node:
    """A node: a stand-in for the agent, and the actors; `ranks[0]` has started the watcher."""

    def __init__(self, job: "Job", number: int, ranks: tuple[int, ...], **options: Any) -> None:
        self.job = job
        self.number = number
        self.agent = subprocess.Popen(["sleep", "600"])
        job.note(self.agent.pid)
        self.ranks = [job.actor(f"rank{rank}") for rank in ranks]
        limits = {"rank_timeout": QUIET_S, "grace_s": GRACE_S, **options}
        self.address = self.ranks[0].do("start_watcher", self.agent.pid, 0, limits)
        for rank, actor in zip(ranks, self.ranks, strict=True):
            self.watcher_pid = self.join(actor, "rank", f"rank {rank}", rank)

    def join(
        self, actor: Actor, kind: str, name: str, rank: int | None = None, default_callback: bool = False
    ) -> int:
        """Register an actor with this node's watcher; return the watcher's pid."""
        hello = {"kind": kind, "name": name, "rank": rank, "pid": actor.pid}
        watcher_pid: int = actor.do("connect", self.address, hello, PATIENCE_S, default_callback)
        self.job.note(watcher_pid)
        return watcher_pid

    def child(self, kind: str, name: str) -> Actor:
        """Start one more member."""
        actor = self.job.actor(kind)
        self.join(actor, kind, name)
        return actor

    @property
    def log(self) -> str:
        """What its watcher and local rank 0 have written to stderr."""
        return self.ranks[0].log.read_text()


class Job:
    """Everything that a test has started; `close` ends it and checks that no watcher is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._noted: list[Process] = []
        self._ranks: tuple[tuple[int, ...], ...] = ()
        self._actors: list[Actor] = []
        self.nodes: list[Node] = []

    def note(self, pid: int) -> None:
        """Record a process that must be gone at the end."""
        process = look(pid)
        if process is not None:
            self._noted.append(process)

    def actor(self, name: str) -> Actor:
        """Start a process."""
        actor = Actor(self, self._folder / f"{len(self._actors)}-{name}.log")
        self._actors.append(actor)
        return actor

    def node(self, *ranks: int, **options: Any) -> Node:
        """Add a node with these global ranks; the options go to `start_watcher`."""
        node = Node(self, len(self.nodes), ranks, **options)
        self.nodes.append(node)
        self._ranks = (*self._ranks, ranks)
        return node

    def config(self, node: int, port: int, **changes: Any) -> dict[str, Any]:
        """Return the configuration of one node."""
        values: dict[str, Any] = {
            "node": node,
            "hostnames": tuple("abcdef"[: len(self.nodes)]),
            "ranks": self._ranks,
            "head_address": "127.0.0.1",
            "head_port": port,
            "round_id": ROUND_ID,
            "rank_timeout": QUIET_S,
            "grace_s": GRACE_S,
            **changes,
        }
        return WatchConfig(**values).to_json()

    def configure(self, **changes: Any) -> int:
        """Connect the watchers of all nodes; return the head's port once all are connected."""
        head = self.nodes[0].ranks[0]
        port: int = head.link("listen", "127.0.0.1") if len(self.nodes) > 1 else 0
        for node in self.nodes:
            node.ranks[0].do("configure", self.config(node.number, port, **changes))
        wait_until(self.all_seen, PATIENCE_S, "the watchers of all nodes to connect")
        return port

    def all_seen(self) -> bool:
        """Return whether the watchers of all nodes are connected to the head's."""
        view = self.nodes[0].ranks[0].link("view", PATIENCE_S)
        return all(node["seen_s_ago"] is not None for node in view["nodes"])

    def all_gone(self) -> None:
        """Wait until all recorded processes except the agents are gone."""
        agents = {node.agent.pid for node in self.nodes}
        assert_gone([process for process in self._noted if process.pid not in agents], GONE_S)

    def kill_actors(self) -> None:
        """Kill all actors; some would stay for the whole grace time."""
        for actor in self._actors:
            actor.process.kill()

    def close(self) -> None:
        """End everything by pid; AssertionError if a watcher outlives its members by more than 10 s."""
        for node in self.nodes:
            node.agent.kill()
            node.agent.wait()
        self.kill_actors()
        for actor in self._actors:
            actor.close()
        assert_gone(self._noted, 10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
