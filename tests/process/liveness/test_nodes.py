"""Two nodes, two watchers, one TCP connection between them: what happens on one node is reported on both."""

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
from tests.support.liveness import PATIENCE_S, Actor, Job, Node

REPORTED_S = 10.0
"""Limit in seconds for what takes 0.5 s on a quiet machine; silence alone is noticed after `QUIET_S`."""
SILENT_S = 15.0
"""The same for failures that are noticed only after seconds of silence, or of a hang."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as running:
        yield running


def two_nodes(job: Job, **changes: Any) -> tuple[Node, Node]:
    """Start the head a with ranks 0 and 1, and node b with ranks 2 and 3."""
    head, other = job.node(0, 1), job.node(2, 3)
    job.configure(**changes)
    return head, other


def common_root_cause(actors: list[Actor], since: float, within_s: float) -> dict[str, Any]:
    """Return the root cause that each of them received, within `within_s` seconds after `since`."""
    root_causes = [actor.expect("root_cause") for actor in actors]
    slowest = max(root_cause.pop("at") for root_cause in root_causes) - since
    print(f"all had received it after {slowest:.3f} s: {root_causes[0]['cause']}")
    assert slowest < within_s
    assert all(root_cause == root_causes[0] for root_cause in root_causes)
    return root_causes[0]


@pytest.mark.parametrize("key", [None, "a shared secret"])
def test_a_remote_rank_killed_is_known_everywhere_at_once(job: Job, key: str | None) -> None:
    head, other = two_nodes(job, key=key)
    at = other.ranks[1].kill()
    root_cause = common_root_cause([*head.ranks, other.ranks[0]], at, REPORTED_S)
    assert root_cause["cause"] == f"rank 3 (pid {other.ranks[1].pid}, node b) was killed by SIGKILL"
    assert (root_cause["rank"], root_cause["hostname"]) == (3, "b")
    job.kill_actors()
    job.all_gone()


def test_a_rank_of_the_head_killed_is_known_everywhere_at_once(job: Job) -> None:
    head, other = two_nodes(job)
    at = head.ranks[0].kill()
    root_cause = common_root_cause([head.ranks[1], *other.ranks], at, REPORTED_S)
    assert root_cause["cause"].startswith("rank 0 (") and root_cause["hostname"] == "a"
    job.all_gone()  # both watchers kill members that do not end by themselves


def test_all_ranks_of_a_node_killed(job: Job) -> None:
    head, other = two_nodes(job)
    at = time.monotonic()
    for actor in other.ranks:
        actor.kill()
    root_cause = common_root_cause(head.ranks, at, REPORTED_S)
    assert root_cause["hostname"] == "b" and "was killed by SIGKILL" in root_cause["cause"]


def test_a_report_on_one_node_wins_over_what_others_notice_of_it(job: Job) -> None:
    head, other = two_nodes(job)
    # The head's watcher continues first, and receives the consequence first; it decides 2 s later.
    with frozen(other.watcher_pid), frozen(head.watcher_pid):
        other.ranks[0].send("fail_and_exit", "RuntimeError: out of memory", False, 1)
        other.ranks[0].process.wait(PATIENCE_S)
        head.ranks[0].link("failed", "Connection closed by peer", peer=True)
    root_cause = common_root_cause([*head.ranks, other.ranks[1]], time.monotonic(), REPORTED_S)
    assert root_cause["rank"] == 2 and root_cause["cause"].endswith("RuntimeError: out of memory")


def test_the_remote_watcher_killed(job: Job) -> None:
    head, other = two_nodes(job)
    at = time.monotonic()
    os.kill(other.watcher_pid, signal.SIGKILL)
    root_cause = common_root_cause(head.ranks, at, REPORTED_S)
    assert "node b (ranks 2-3): its watcher is gone" in root_cause["cause"]
    for actor in other.ranks:
        assert actor.expect("root_cause")["cause"] == "the watcher on node b is gone"
    job.all_gone()  # without a watcher, the link of each member kills it


def test_the_remote_watcher_stopped(job: Job) -> None:
    head, other = two_nodes(job, rank_timeout=3.0)
    at = time.monotonic()
    os.kill(other.watcher_pid, signal.SIGSTOP)
    root_cause = common_root_cause(head.ranks, at, SILENT_S)
    # Its own members notice at about the same time, and kill it; silence is the root cause all the same.
    assert "node b (ranks 2-3) has been silent for" in root_cause["cause"]
    for actor in other.ranks:
        assert "the watcher on node b" in actor.expect("root_cause")["cause"]
    job.kill_actors()
    job.all_gone()


def test_the_heads_watcher_killed(job: Job) -> None:
    head, other = two_nodes(job)
    at = time.monotonic()
    os.kill(head.watcher_pid, signal.SIGKILL)
    root_cause = common_root_cause(other.ranks, at, REPORTED_S)
    assert "the head, node a (ranks 0-1): its watcher is gone" in root_cause["cause"]
    for actor in head.ranks:
        assert actor.expect("root_cause")["cause"] == "the watcher on node a is gone"
    job.kill_actors()
    job.all_gone()


def test_the_heads_watcher_stopped(job: Job) -> None:
    head, other = two_nodes(job, rank_timeout=3.0)
    at = time.monotonic()
    os.kill(head.watcher_pid, signal.SIGSTOP)
    root_cause = common_root_cause(other.ranks, at, SILENT_S)
    assert "the head, node a (ranks 0-1) has been silent for" in root_cause["cause"]
    for actor in head.ranks:
        assert "the watcher on node a" in actor.expect("root_cause")["cause"]
    job.kill_actors()
    job.all_gone()


class Link:
    """A TCP proxy to `port`. After `cut` it forwards nothing, and closes no connection."""

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
        """Stop forwarding; return the time (time.monotonic)."""
        self._cut.set()
        return time.monotonic()

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for sock in (self._listener, *self._ends):
            sock.close()


def test_a_cut_link_ends_both_sides(job: Job) -> None:
    head, other = job.node(0, 1), job.node(2, 3)
    port = head.ranks[0].link("listen", "127.0.0.1")
    assert (
        other.ranks[0].link("listen", "127.0.0.1") != port
    )  # before the rendezvous any node may become the head
    with Link(port) as link:
        for node, to in ((head, port), (other, link.port)):
            node.ranks[0].do("configure", job.config(node.number, to, rank_timeout=3.0))
        wait_until(job.all_seen, PATIENCE_S, "both nodes to see each other")
        at = link.cut()
        root_cause = common_root_cause(head.ranks, at, SILENT_S)
        assert (
            "node b (ranks 2-3) has been silent for" in root_cause["cause"] and root_cause["detect_s"] > 3.0
        )
        root_cause = common_root_cause(other.ranks, at, SILENT_S)
        assert "the head, node a (ranks 0-1) has been silent for" in root_cause["cause"]
        job.kill_actors()
        job.all_gone()


def test_a_busy_head_does_not_count_as_lost(job: Job) -> None:
    head, other = two_nodes(job, rank_timeout=5.0)
    with frozen(other.watcher_pid):
        time.sleep(0.6)
    head.ranks[0].do("hold_gil", 4.0)  # longer than a node may be silent
    assert not any(actor.saw("root_cause") for actor in [*head.ranks, *other.ranks])


def test_a_remote_hang_writes_stacks_on_all_nodes(job: Job) -> None:
    head, other = two_nodes(job, step_timeout=1.0)
    at = time.monotonic()
    other.ranks[1].do("entry", "step_begin", [])
    other.ranks[1].send("hold_gil", 30)
    root_cause = common_root_cause([*head.ranks, other.ranks[0]], at, SILENT_S)
    assert root_cause["rank"] == 3 and "step 1 has made no progress" in root_cause["cause"]
    for actor in [*head.ranks, *other.ranks]:
        actor.wait_stacks()
    job.kill_actors()
    job.all_gone()


def test_drain_travels_to_every_rank_of_every_node(job: Job) -> None:
    head, other = two_nodes(job)
    other.ranks[1].link("request_drain", "SIGTERM on node b")
    other.ranks[0].link("request_drain", "SIGTERM on node b again")
    ranks = [*head.ranks, *other.ranks]
    for actor in ranks:
        assert actor.expect("drain")["reason"] == "SIGTERM on node b"
    assert head.ranks[0].link("view", PATIENCE_S)["draining"] == "SIGTERM on node b"
    assert not any(actor.saw("drain") for actor in ranks)


def test_a_drain_requested_before_the_watchers_connect_is_not_lost(job: Job) -> None:
    head, other = job.node(0, 1), job.node(2, 3)
    other.ranks[0].link("request_drain", "SIGTERM before the rendezvous")
    job.configure()
    for actor in [*head.ranks, *other.ranks]:
        assert actor.expect("drain")["reason"] == "SIGTERM before the rendezvous"


def assert_ended(job: Job, head: Node, other: Node, end: End) -> None:
    """Check that all ranks receive the normal end, and that their deaths are then no failures."""
    for actor in [*head.ranks, *other.ranks]:
        announced = actor.expect("end")
        assert (announced["code"], announced["unserved"]) == (end.code, end.unserved)
    for actor in [*other.ranks, *head.ranks]:
        actor.kill()
    job.all_gone()
    assert "failed" not in head.log + other.log


@pytest.mark.parametrize(("last_by_head", "all_unserved"), [(True, True), (False, True), (False, False)])
def test_the_end_comes_with_the_last_of_several_parts(
    job: Job, last_by_head: bool, all_unserved: bool
) -> None:
    head, other = two_nodes(job)
    first, last = (other, head) if last_by_head else (head, other)
    assert first.ranks[0].announce_end(End(0, 2, 4, unserved=True), 0.5) is False
    assert first.ranks[0].announce_end(End(0, 2), 0.5) is False  # a second time
    assert not any(actor.saw("end") for actor in [*head.ranks, *other.ranks])
    assert last.ranks[1].announce_end(End(1, 2, unserved=all_unserved)) is True
    assert_ended(job, head, other, End(0, 1, 4, unserved=all_unserved))


@pytest.mark.parametrize("by_head", [True, False])
def test_normal_end(job: Job, by_head: bool) -> None:
    head, other = two_nodes(job)
    assert (head if by_head else other).ranks[0].announce_end(End(code=3)) is True
    assert_ended(job, head, other, End(code=3))


def test_ranks_that_leave_without_announcing_are_no_failure(job: Job) -> None:
    head, other = two_nodes(job)
    for node in (other, head):
        for actor in node.ranks:
            actor.link("leaving")
            actor.send("exit", 0)
    job.all_gone()
    assert "failed" not in head.log + other.log


def test_the_view_of_the_head_is_the_whole_job(job: Job) -> None:
    head, other = two_nodes(job)
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


def test_a_node_that_does_not_come_is_named(job: Job) -> None:
    head, other = job.node(0, 1), job.node(2)
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


def test_a_wrong_key_or_round_id_is_refused_and_the_job_continues(job: Job) -> None:
    """All wrong nodes try at the same time, because each tries until its join timeout."""
    head, *intruders, other = job.node(0, 1), *(job.node(7) for _ in WRONG), job.node(2)
    port = head.ranks[0].link("listen", "127.0.0.1")
    right = {"key": "a shared secret", "hostnames": ("a", "b"), "ranks": ((0, 1), (2,))}
    head.ranks[0].do("configure", job.config(0, port, **right))
    for intruder, wrong in zip(intruders, WRONG, strict=True):
        intruder.ranks[0].do("configure", job.config(1, port, **{**right, "join_timeout": 3.0, **wrong}))
    for intruder, wrong in zip(intruders, WRONG, strict=True):
        cause = intruder.ranks[0].expect("root_cause")["cause"]
        assert "could not join" in cause and "it refused us" in cause, wrong
    dropped = "dropped a connection from 127.0.0.1"
    wait_until(lambda: head.log.count(dropped) >= len(WRONG), PATIENCE_S, "lines in the log")
    other.ranks[0].do("configure", job.config(1, port, **right))
    wait_until(job.all_seen, PATIENCE_S, "the right node to be accepted")
    assert not head.ranks[0].saw("root_cause") and not other.ranks[0].saw("root_cause")


GARBAGE = [
    *(b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\x00" * 10_000, b'{"t":"hello","node":"x"}\n', b""),
    *(b'{"t":"hello","node":Infinity}\n', b'{"t":"hello","node":1e999,"round_id":"x","nonce":"y"}\n'),
    *(b'{"t":"hello","node":{},"round_id":[],"nonce":null}\n', b"[" * 4000 + b"\n", b'{"t":1}\n'),
    *(b'{"t":"hello","node":true,"round_id":"0123456789ab","nonce":"n"}\n', b"1" * 4000 + b"\n"),
]


def test_garbage_does_not_end_the_job(job: Job) -> None:
    head, other = job.node(0), job.node(1)
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


def test_a_second_watcher_of_a_connected_node_is_refused(job: Job) -> None:
    head, other = job.node(0), job.node(1)
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
