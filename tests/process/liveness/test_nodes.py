"""Two hosts, two watchers, one TCP connection between them: whatever happens on one is known on the other."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import wait_until
from spmd_serve.liveness import End
from spmd_serve.wire.lines import LineBuffer, Seal, unpack
from tests.support.faults import frozen
from tests.support.liveness import PATIENCE_S, Actor, Host, Job

TOLD_S = 10.0
"""Half a second on a quiet machine. A starved one may take longer; silence alone would take `QUIET_S`."""
SILENT_S = 15.0
"""The same for what takes seconds of silence, or of a hang, to be noticed at all."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as running:
        yield running


def two_hosts(job: Job, **changes: Any) -> tuple[Host, Host]:
    """Head a with ranks 0 and 1, host b with ranks 2 and 3."""
    head, other = job.host(0, 1), job.host(2, 3)
    job.configure(**changes)
    return head, other


def everybody_is_told(actors: list[Actor], since: float, within_s: float) -> dict[str, Any]:
    """The one verdict that all of them got."""
    verdicts = [actor.expect("root_cause") for actor in actors]
    slowest = max(root_cause.pop("at") for root_cause in verdicts) - since
    print(f"all were told after {slowest:.3f} s: {verdicts[0]['cause']}")
    assert slowest < within_s
    assert all(root_cause == verdicts[0] for root_cause in verdicts)
    return verdicts[0]


@pytest.mark.parametrize("key", [None, "a shared secret"])
def test_a_remote_rank_killed_is_known_everywhere_at_once(job: Job, key: str | None) -> None:
    head, other = two_hosts(job, key=key)
    at = other.ranks[1].kill()
    root_cause = everybody_is_told([*head.ranks, other.ranks[0]], at, TOLD_S)
    assert root_cause["cause"] == f"rank 3 (pid {other.ranks[1].pid}, node b) was killed by SIGKILL"
    assert (root_cause["rank"], root_cause["hostname"]) == (3, "b")
    job.kill_actors()
    job.all_gone()


def test_a_rank_of_the_head_killed_is_known_everywhere_at_once(job: Job) -> None:
    head, other = two_hosts(job)
    at = head.ranks[0].kill()
    root_cause = everybody_is_told([head.ranks[1], *other.ranks], at, TOLD_S)
    assert root_cause["cause"].startswith("rank 0 (") and root_cause["hostname"] == "a"
    job.all_gone()  # both watchers end whoever does not end by itself


def test_all_ranks_of_a_host_killed(job: Job) -> None:
    head, other = two_hosts(job)
    at = time.monotonic()
    for actor in other.ranks:
        actor.kill()
    root_cause = everybody_is_told(head.ranks, at, TOLD_S)
    assert root_cause["hostname"] == "b" and "was killed by SIGKILL" in root_cause["cause"]


def test_a_report_on_one_host_wins_over_what_others_notice_of_it(job: Job) -> None:
    head, other = two_hosts(job)
    # The head's watcher goes on first, and hears of the consequence first; it judges 2 s later.
    with frozen(other.watcher_pid), frozen(head.watcher_pid):
        other.ranks[0].send("fail_and_exit", "RuntimeError: out of memory", False, 1)
        other.ranks[0].process.wait(PATIENCE_S)
        head.ranks[0].link("failed", "Connection closed by peer", peer=True)
    root_cause = everybody_is_told([*head.ranks, other.ranks[1]], time.monotonic(), TOLD_S)
    assert root_cause["rank"] == 2 and root_cause["cause"].endswith("RuntimeError: out of memory")


def test_the_remote_watcher_killed(job: Job) -> None:
    head, other = two_hosts(job)
    at = time.monotonic()
    os.kill(other.watcher_pid, signal.SIGKILL)
    root_cause = everybody_is_told(head.ranks, at, TOLD_S)
    assert "node b (ranks 2-3): its watcher is gone" in root_cause["cause"]
    for actor in other.ranks:
        assert actor.expect("root_cause")["cause"] == "the watcher on node b is gone"
    job.all_gone()  # without a watcher, who does not end by itself is ended by its own link


def test_the_remote_watcher_stopped(job: Job) -> None:
    head, other = two_hosts(job, rank_timeout=3.0)
    at = time.monotonic()
    os.kill(other.watcher_pid, signal.SIGSTOP)
    root_cause = everybody_is_told(head.ranks, at, SILENT_S)
    # Its own members notice at about the same time, and end it; silence is the cause all the same.
    assert "node b (ranks 2-3) has been silent for" in root_cause["cause"]
    for actor in other.ranks:
        assert "the watcher on node b" in actor.expect("root_cause")["cause"]
    job.kill_actors()
    job.all_gone()


def test_the_heads_watcher_killed(job: Job) -> None:
    head, other = two_hosts(job)
    at = time.monotonic()
    os.kill(head.watcher_pid, signal.SIGKILL)
    root_cause = everybody_is_told(other.ranks, at, TOLD_S)
    assert "the head, node a (ranks 0-1): its watcher is gone" in root_cause["cause"]
    for actor in head.ranks:
        assert actor.expect("root_cause")["cause"] == "the watcher on node a is gone"
    job.kill_actors()
    job.all_gone()


def test_the_heads_watcher_stopped(job: Job) -> None:
    head, other = two_hosts(job, rank_timeout=3.0)
    at = time.monotonic()
    os.kill(head.watcher_pid, signal.SIGSTOP)
    root_cause = everybody_is_told(other.ranks, at, SILENT_S)
    assert "the head, node a (ranks 0-1) has been silent for" in root_cause["cause"]
    for actor in head.ranks:
        assert "the watcher on node a" in actor.expect("root_cause")["cause"]
    job.kill_actors()
    job.all_gone()


class Cable:
    """A TCP connection to `port` that can be cut: then nothing travels any more, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE_S)
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._cut = threading.Event()
        self._threads = [threading.Thread(target=self._connect, args=(port,))]
        self._threads[0].start()

    def _connect(self, port: int) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        self._ends += [near, far]
        for source, target in ((near, far), (far, near)):
            self._threads.append(threading.Thread(target=self._carry, args=(source, target)))
            self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        source.settimeout(0.05)
        while not self._cut.is_set():
            with contextlib.suppress(TimeoutError):
                data = source.recv(65536)
                if not data:
                    return
                target.sendall(data)

    def cut(self) -> float:
        """Returns the time."""
        self._cut.set()
        return time.monotonic()

    def __enter__(self) -> "Cable":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for sock in (self._listener, *self._ends):
            sock.close()


def test_a_cut_cable_ends_both_sides(job: Job) -> None:
    head, other = job.host(0, 1), job.host(2, 3)
    port = head.ranks[0].link("listen", "127.0.0.1")
    assert other.ranks[0].link("listen", "127.0.0.1") != port  # nobody knows yet who will be the head
    with Cable(port) as cable:
        for host, to in ((head, port), (other, cable.port)):
            host.ranks[0].do("configure", job.config(host.node, to, rank_timeout=3.0))
        wait_until(job.all_seen, PATIENCE_S, "both hosts to see each other")
        at = cable.cut()
        root_cause = everybody_is_told(head.ranks, at, SILENT_S)
        assert (
            "node b (ranks 2-3) has been silent for" in root_cause["cause"] and root_cause["detect_s"] > 3.0
        )
        root_cause = everybody_is_told(other.ranks, at, SILENT_S)
        assert "the head, node a (ranks 0-1) has been silent for" in root_cause["cause"]
        job.kill_actors()
        job.all_gone()


def test_a_busy_head_is_not_taken_for_dead(job: Job) -> None:
    head, other = two_hosts(job, rank_timeout=5.0)
    with frozen(other.watcher_pid):
        time.sleep(0.6)
    head.ranks[0].do("hold_gil", 4.0)  # longer than a host may be silent
    assert not any(actor.saw("root_cause") for actor in [*head.ranks, *other.ranks])


def test_a_remote_hang_writes_stacks_on_all_hosts(job: Job) -> None:
    head, other = two_hosts(job, step_timeout=1.0)
    at = time.monotonic()
    other.ranks[1].do("entry", "step_begin", [])
    other.ranks[1].send("hold_gil", 30)
    root_cause = everybody_is_told([*head.ranks, other.ranks[0]], at, SILENT_S)
    assert root_cause["rank"] == 3 and "step 1 has made no progress" in root_cause["cause"]
    for actor in [*head.ranks, *other.ranks]:
        actor.wait_stacks()
    job.kill_actors()
    job.all_gone()


def test_drain_travels_to_every_rank_of_every_host(job: Job) -> None:
    head, other = two_hosts(job)
    other.ranks[1].link("request_drain", "SIGTERM on host b")
    other.ranks[0].link("request_drain", "SIGTERM on host b again")
    ranks = [*head.ranks, *other.ranks]
    for actor in ranks:
        assert actor.expect("drain")["reason"] == "SIGTERM on host b"
    assert head.ranks[0].link("view", PATIENCE_S)["draining"] == "SIGTERM on host b"
    assert not any(actor.saw("drain") for actor in ranks)


def test_a_drain_that_was_asked_for_before_the_hosts_met_is_not_lost(job: Job) -> None:
    head, other = job.host(0, 1), job.host(2, 3)
    other.ranks[0].link("request_drain", "SIGTERM early")
    job.configure()
    for actor in [*head.ranks, *other.ranks]:
        assert actor.expect("drain")["reason"] == "SIGTERM early"


def assert_ended(job: Job, head: Host, other: Host, end: End) -> None:
    """All hear of the normal end, and what to end with; then nobody's death is a failure."""
    for actor in [*head.ranks, *other.ranks]:
        heard = actor.expect("end")
        assert (heard["code"], heard["unserved"]) == (end.code, end.unserved)
    for actor in [*other.ranks, *head.ranks]:
        actor.kill()
    job.all_gone()
    assert "failed" not in head.log + other.log


@pytest.mark.parametrize(("last_by_head", "all_unserved"), [(True, True), (False, True), (False, False)])
def test_the_end_comes_with_the_last_of_several_parts(
    job: Job, last_by_head: bool, all_unserved: bool
) -> None:
    head, other = two_hosts(job)
    first, last = (other, head) if last_by_head else (head, other)
    assert first.ranks[0].announce_end(End(0, 2, 4, unserved=True), 0.5) is False
    assert first.ranks[0].announce_end(End(0, 2), 0.5) is False  # the same one again
    assert not any(actor.saw("end") for actor in [*head.ranks, *other.ranks])
    assert last.ranks[1].announce_end(End(1, 2, unserved=all_unserved)) is True
    assert_ended(job, head, other, End(0, 1, 4, unserved=all_unserved))


@pytest.mark.parametrize("by_head", [True, False])
def test_normal_end(job: Job, by_head: bool) -> None:
    head, other = two_hosts(job)
    assert (head if by_head else other).ranks[0].announce_end(End(code=3)) is True
    assert_ended(job, head, other, End(code=3))


def test_ranks_that_leave_without_announcing_are_no_failure(job: Job) -> None:
    head, other = two_hosts(job)
    for host in (other, head):
        for actor in host.ranks:
            actor.link("leaving")
            actor.send("exit", 0)
    job.all_gone()
    assert "failed" not in head.log + other.log


def test_the_view_of_the_head_is_the_whole_job(job: Job) -> None:
    head, other = two_hosts(job)
    other.ranks[0].do("entry", "state", ["ready"])

    def complete() -> bool:
        view = head.ranks[0].link("view", PATIENCE_S)
        return [(one["name"], one["hostname"], one["state"]) for one in view["members"]] == [
            ("rank 0", "a", "starting"),
            ("rank 1", "a", "starting"),
            ("rank 2", "b", "ready"),
            ("rank 3", "b", "starting"),
        ]

    wait_until(complete, PATIENCE_S, "the view to show all four ranks")


def test_a_host_that_does_not_come_is_named(job: Job) -> None:
    head, other = job.host(0, 1), job.host(2)
    port = head.ranks[0].link("listen", "127.0.0.1")
    head.ranks[0].do("configure", job.config(0, port, join_timeout=0.5))
    assert (
        "node b (rank 2): its watcher has not connected within 0.5 s"
        in head.ranks[0].expect("root_cause")["cause"]
    )
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        blocked = job.config(1, nobody.getsockname()[1], join_timeout=0.5)
        other.ranks[0].do("configure", blocked)
        cause = other.ranks[0].expect("root_cause")["cause"]
    assert "could not join that of the head node a (ranks 0-1)" in cause and "Connection refused" in cause


WRONG: list[dict[str, Any]] = [
    {"key": "another secret"},
    {"key": None},
    {"round_id": "ba9876543210"},
]


def test_a_wrong_key_or_generation_is_refused_and_the_job_lives(job: Job) -> None:
    """Three strangers at once, for each tries on for as long as it may take to join."""
    head, *strangers, other = job.host(0, 1), *(job.host(7) for _ in WRONG), job.host(2)
    port = head.ranks[0].link("listen", "127.0.0.1")
    right = {"key": "a shared secret", "hostnames": ("a", "b"), "ranks": ((0, 1), (2,))}
    head.ranks[0].do("configure", job.config(0, port, **right))
    for stranger, wrong in zip(strangers, WRONG, strict=True):
        stranger.ranks[0].do("configure", job.config(1, port, **{**right, "join_timeout": 3.0, **wrong}))
    for stranger, wrong in zip(strangers, WRONG, strict=True):
        cause = stranger.ranks[0].expect("root_cause")["cause"]
        assert "could not join" in cause and "it refused us" in cause, wrong
    dropped = "dropped a connection from 127.0.0.1"
    wait_until(lambda: head.log.count(dropped) >= len(WRONG), PATIENCE_S, "lines in the log")
    other.ranks[0].do("configure", job.config(1, port, **right))
    wait_until(job.all_seen, PATIENCE_S, "the right one to be taken")
    assert not head.ranks[0].saw("root_cause") and not other.ranks[0].saw("root_cause")


GARBAGE = [
    *(b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\x00" * 10_000, b'{"t":"hello","node":"x"}\n', b""),
    *(b'{"t":"hello","node":Infinity}\n', b'{"t":"hello","node":1e999,"round_id":"x","nonce":"y"}\n'),
    *(b'{"t":"hello","node":{},"round_id":[],"nonce":null}\n', b"[" * 4000 + b"\n", b'{"t":1}\n'),
    *(b'{"t":"hello","node":true,"round_id":"0123456789ab","nonce":"n"}\n', b"1" * 4000 + b"\n"),
]


def test_garbage_from_strangers_does_not_end_the_job(job: Job) -> None:
    head, other = job.host(0), job.host(1)
    port = job.configure()
    for garbage in GARBAGE:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
    dropped = "dropped a connection from"
    wait_until(
        lambda: head.log.count(dropped) == len(GARBAGE), PATIENCE_S, "all to be dropped with a line each"
    )
    assert head.ranks[0].link("view", PATIENCE_S)["root_cause"] is None
    assert not other.ranks[0].saw("root_cause")


def test_a_second_watcher_of_a_host_that_is_here_is_refused(job: Job) -> None:
    head, other = job.host(0), job.host(1)
    port = job.configure()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        lines, seal = LineBuffer(), Seal(None, "node", "head")
        lines.feed(sock.recv(4096))
        assert unpack(lines.take()[0])["t"] == "challenge"
        sock.sendall(seal.wrap({"t": "hello", "node": 1, "round_id": "0123456789ab", "nonce": "n"}))
        assert sock.recv(4096) == b""
    wait_until(
        lambda: "node 1 is not expected, or has connected already" in head.log,
        PATIENCE_S,
        "a line in the log",
    )
    assert not other.ranks[0].saw("root_cause")
