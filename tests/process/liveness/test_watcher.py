"""One node with real members: kill -9, SIGSTOP and hangs; what the other members receive, and when."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from harness.processes import assert_gone, look
from harness.waiting import wait_until
from spmd_serve.liveness import End
from tests.support.faults import frozen
from tests.support.liveness import PATIENCE_S, Actor, Job, Node
from tests.support.view import fetch_view

REPORTED_S = 10.0
"""Limit in seconds for what takes 0.4 s on a quiet machine; silence alone is noticed after `QUIET_S`."""
DRIVER_S = 5.0
"""Longer than an engine core's loop may stand still with --step-timeout 0.5, seconds."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as running:
        yield running


def test_kill_9_is_reported_to_the_others_at_once(job: Job) -> None:
    node = job.node(0, 1)
    engine = node.child("engine", "engine core")
    job.configure()
    at = node.ranks[1].kill()
    for actor in (node.ranks[0], engine):
        root_cause = actor.expect("root_cause")
        print(f"reported after {root_cause['at'] - at:.3f} s")
        assert root_cause["at"] - at < REPORTED_S
        assert root_cause["cause"] == f"rank 1 (pid {node.ranks[1].pid}, node a) was killed by SIGKILL"
        assert (root_cause["rank"], root_cause["hostname"]) == (1, "a")
    job.all_gone()  # the watcher kills members that do not end by themselves, then exits


def test_the_default_answer_is_one_line_and_exit_code_1(job: Job) -> None:
    node = job.node(0)
    other = job.actor("other")
    node.join(other, "rank", "rank 1", 1, default_callback=True)
    node.ranks[0].kill()
    assert other.process.wait(PATIENCE_S) == 1
    assert other.log.read_text().count("rank 0 (pid") == 1
    # After everything that the members print, the watcher writes the root cause once per node.
    wait_until(lambda: node.log.endswith(" was killed by SIGKILL\n"), PATIENCE_S, "the watcher's last line")
    assert node.log.count("spmd_serve watcher: the job has failed: rank 0 (") == 1


def test_death_before_the_rendezvous_and_of_the_watchers_parent(job: Job) -> None:
    node = job.node(0, 1)
    at = node.ranks[0].kill()
    root_cause = node.ranks[1].expect("root_cause")
    assert "rank 0" in root_cause["cause"] and root_cause["at"] - at < REPORTED_S


@pytest.mark.parametrize(
    ("command", "text"),
    [(("exit", 3), "ended with exit code 3 and reported no error"), (("crash",), "was killed by SIGSEGV")],
)
def test_an_unexplained_exit_says_how(job: Job, command: tuple[object, ...], text: str) -> None:
    node = job.node(0, 1)
    node.ranks[1].send(str(command[0]), *command[1:])
    assert text in node.ranks[0].expect("root_cause")["cause"]


def test_the_end_is_seen_though_a_forked_child_holds_the_descriptors(job: Job) -> None:
    node = job.node(0, 1)
    child = look(node.ranks[1].do("fork_child", False))
    assert child is not None
    try:
        at = node.ranks[1].kill()
        root_cause = node.ranks[0].expect("root_cause")
        assert (
            root_cause["at"] - at < REPORTED_S and "SIGKILL" in root_cause["cause"]
        )  # not what the child reported
        job.kill_actors()
        job.all_gone()
    finally:
        child.signal(signal.SIGKILL)


def test_a_members_own_report_wins_over_its_consequences(job: Job) -> None:
    node = job.node(0, 1)
    with frozen(node.watcher_pid):  # so that it cannot decide before it has received the second report
        node.ranks[0].send("fail_and_exit", "Connection closed by peer", True, 1)
        node.ranks[0].process.wait(PATIENCE_S)
        node.ranks[1].link("failed", "ValueError: bad weights")
    root_cause = node.ranks[1].expect("root_cause")
    assert root_cause["cause"].endswith("ValueError: bad weights") and root_cause["rank"] == 1


def test_a_report_wins_over_an_unexplained_exit(job: Job) -> None:
    node = job.node(0, 1)
    with frozen(node.watcher_pid):  # so that it notices both in one turn of its loop
        node.ranks[0].send("exit", 1)
        node.ranks[0].process.wait(PATIENCE_S)
        node.ranks[1].link("failed", "ValueError: bad weights")
    assert node.ranks[1].expect("root_cause")["rank"] == 1


def test_children_that_die_with_their_rank_do_not_hide_it(job: Job) -> None:
    node = job.node(0, 1)
    engine = node.child("engine", "engine core")
    with frozen(node.watcher_pid):
        engine.kill()
        engine.process.wait(PATIENCE_S)
        node.ranks[1].kill()
        node.ranks[1].process.wait(PATIENCE_S)
    assert node.ranks[0].expect("root_cause")["rank"] == 1


def test_sigstop_is_reported_within_rank_timeout_and_slow_ranks_are_not(job: Job) -> None:
    node = job.node(0, 1, 2)
    job.configure(rank_timeout=3.0, expect_turns=True)
    for actor in node.ranks:
        actor.do("entry", "state", ["loading"])
    node.ranks[0].send("burn_holding_gil", 3.5)
    node.ranks[1].send("hold_gil", 3.5)
    node.ranks[0].answer()
    node.ranks[1].answer()
    view = node.ranks[2].link("view", PATIENCE_S)
    assert view["root_cause"] is None
    assert not any(actor.saw("root_cause") for actor in node.ranks)
    at = node.ranks[1].kill(signal.SIGSTOP)
    root_cause = node.ranks[2].expect("root_cause")
    print(f"SIGSTOP reported after {root_cause['at'] - at:.3f} s")
    assert 1.5 <= root_cause["at"] - at < 15.0
    assert "rank 1 " in root_cause["cause"] and "has been stopped (SIGSTOP) for" in root_cause["cause"]
    assert root_cause["detect_s"] >= 1.5
    job.kill_actors()
    job.all_gone()


def test_a_short_stop_is_no_failure(job: Job) -> None:
    node = job.node(0, 1)
    job.configure(rank_timeout=6.0)
    node.ranks[1].kill(signal.SIGSTOP)
    wait_until(
        lambda: _state(node.ranks[0].link("view", PATIENCE_S), "rank 1") == "stopped",
        PATIENCE_S,
        "the stop shows in the view",
    )
    node.ranks[1].kill(signal.SIGCONT)
    wait_until(
        lambda: _state(node.ranks[0].link("view", PATIENCE_S), "rank 1") == "starting",
        PATIENCE_S,
        "it runs again",
    )
    assert node.ranks[1].link("view", PATIENCE_S)["root_cause"] is None


def _state(view: dict[str, list[dict[str, object]]], name: str) -> object:
    return next(member["state"] for member in view["members"] if member["name"] == name)


def test_a_hung_step_fails_after_step_timeout_with_stacks(job: Job) -> None:
    node = job.node(0, 1)
    job.configure(step_timeout=1.0)
    with frozen(node.watcher_pid):  # so that it sees the last step only, however long the others take
        for _ in range(40):
            node.ranks[1].do("entry", "step_begin", [])
            node.ranks[1].do("entry", "step_end", [])
        node.ranks[1].do("entry", "step_begin", [])
        node.ranks[1].send("hold_gil", 30)  # its stacks are written all the same
        at = time.monotonic()
    root_cause = node.ranks[0].expect("root_cause")
    assert 1.0 <= root_cause["at"] - at < 15.0
    assert "rank 1 " in root_cause["cause"] and "step 41 has made no progress for" in root_cause["cause"]
    for actor in node.ranks:
        actor.wait_stacks()
    assert "hold_gil" in node.ranks[1].log.read_text()
    job.kill_actors()
    job.all_gone()


def test_a_step_that_ends_after_all_is_no_failure(job: Job) -> None:
    node = job.node(0, 1)
    job.configure(rank_timeout=8.0, step_timeout=1.0)
    node.ranks[1].do("entry", "step_begin", [])
    wait_until(lambda: "asking" in node.log, PATIENCE_S, "stacks are asked for")
    with frozen(node.watcher_pid):  # so that it cannot decide before a starved rank has ended its step
        node.ranks[1].do("entry", "step_end", [])
    time.sleep(2.5)  # longer than a report of a hang waits before it becomes the root cause
    assert node.ranks[0].link("view", PATIENCE_S)["root_cause"] is None


def test_a_request_for_stacks_does_not_end_a_process_that_has_reset_the_signal(job: Job) -> None:
    node = job.node(0, 1)
    node.ranks[0].do("reset_stacks_signal")  # after its hello
    second = job.actor("second")
    node.join(second, "rank", "rank 2", 2)
    second.do("reset_stacks_signal")
    node.join(second, "api", "API server")  # registers a second time
    job.configure(step_timeout=0.5)
    node.ranks[1].do("entry", "step_begin", [])
    assert "rank 1 " in node.ranks[0].expect("root_cause")["cause"]
    second.wait_stacks()
    assert "hread 0x" not in node.ranks[0].log.read_text()


def test_an_idle_loop_that_does_not_turn_is_hung_but_not_while_it_steps(job: Job) -> None:
    node = job.node(0, 1, 2)
    job.configure(rank_timeout=3.0, expect_turns=True)
    stepping, turning, stuck = node.ranks
    stepping.do("entry", "step_begin", [])
    for actor in node.ranks:
        actor.do("entry", "state", ["ready"])
    turning.do("turn_forever", 0.1)
    stuck.do("turn_forever", 0.1)
    time.sleep(4.0)  # not a synchronisation: the watcher has to see some turns first
    at = time.monotonic()
    stuck.send("burn_holding_gil", 30.0)  # a sleep would end with the signal that asks for stacks
    root_cause = turning.expect("root_cause")
    assert "rank 2 " in root_cause["cause"] and "its loop has not turned" in root_cause["cause"]
    assert root_cause["at"] - at < 15.0


def loaded(job: Job, step_timeout: float) -> tuple[Node, Actor]:
    """Start a node of two ranks whose model is loaded, and its engine core."""
    node = job.node(0, 1)
    engine = node.child("engine", "engine core")
    job.configure(step_timeout=step_timeout)
    engine.do("entry", "state", ["ready"])
    return node, engine


def test_an_engine_core_with_work_but_no_progress_is_hung(job: Job) -> None:
    """It sends heartbeats, and no rank is in a step, which would explain it."""
    node, engine = loaded(job, step_timeout=0.5)
    engine.do("entry", "works", [])
    engine.do("entry", "waits", [])
    at = time.monotonic()
    time.sleep(DRIVER_S)  # not a synchronisation: time in which waiting would count, if it did
    assert node.ranks[0].link("view", PATIENCE_S)["root_cause"] is None
    engine.do("entry", "works", [])
    root_cause = node.ranks[0].expect("root_cause")
    assert root_cause["at"] - at > DRIVER_S + 4.0
    assert (
        f"engine core (pid {engine.pid}, node a) hung: its loop has made no progress" in root_cause["cause"]
    )
    engine.wait_stacks()


def test_a_reply_that_never_comes_is_blamed_on_its_rank(job: Job) -> None:
    node, engine = loaded(job, step_timeout=0.5)
    engine.do("entry", "awaits", [1])
    root_cause = node.ranks[0].expect("root_cause")
    assert root_cause["cause"].startswith(
        f"rank 1 (node a) hung: engine core (pid {engine.pid}, node a) has waited "
    )
    assert (root_cause["rank"], root_cause["hostname"]) == (1, "a")


def test_a_rank_that_hangs_explains_an_engine_core_that_waits_for_it(job: Job) -> None:
    """The engine core has begun to wait seconds earlier."""
    node, engine = loaded(job, step_timeout=2.0)
    engine.do("entry", "awaits", [0])
    time.sleep(1.5)  # the rank's delay, to which 3 s more may be added before the engine core is to blame
    node.ranks[1].do("entry", "step_begin", [])
    assert "rank 1 (" in engine.expect("root_cause")["cause"]


def test_the_watcher_killed_ends_its_members(job: Job) -> None:
    node = job.node(0, 1)
    job.configure()
    at = time.monotonic()
    os.kill(node.watcher_pid, signal.SIGKILL)
    for actor in node.ranks:
        root_cause = actor.expect("root_cause")
        assert root_cause["cause"] == "the watcher on node a is gone" and root_cause["at"] - at < REPORTED_S


def test_a_stopped_watcher_ends_its_members_and_is_ended_by_them(job: Job) -> None:
    node = job.node(0, 1)
    job.configure(rank_timeout=3.0)
    watcher = look(node.watcher_pid)
    assert watcher is not None
    os.kill(node.watcher_pid, signal.SIGSTOP)
    causes = {actor.expect("root_cause")["cause"] for actor in node.ranks}
    assert any("the watcher on node a has been silent for" in cause for cause in causes)
    assert_gone([watcher], 10.0)


def test_a_stopped_watcher_does_not_outlive_its_members(job: Job) -> None:
    node = job.node(0, 1)
    os.kill(node.watcher_pid, signal.SIGSTOP)
    for actor in node.ranks:
        actor.kill()
    job.all_gone()  # its parent's death wakes it


def test_signals_of_the_terminal_do_not_end_the_watcher(job: Job) -> None:
    node = job.node(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(node.watcher_pid, number)
    assert node.ranks[0].link("view", PATIENCE_S)["root_cause"] is None
    assert os.getpgid(node.watcher_pid) != os.getpgid(node.ranks[0].pid)
    with open(f"/proc/{node.watcher_pid}/comm") as comm:
        assert comm.read() == "spmd-watcher\n"


def test_the_watcher_exits_if_no_member_ever_registers(job: Job) -> None:
    actor = job.actor("lonely")
    address = actor.do("start_watcher", os.getpid(), 12345, {"watch_agent": False})
    assert fetch_view(address, 5.0)["members"] == []
    actor.kill()

    def refused() -> bool:
        try:
            fetch_view(address, 1.0)
        except OSError:
            return True
        return False

    wait_until(refused, 10.0, "the end of the watcher")


@pytest.mark.by_hand  # waits 10 s for one timer of the watcher
def test_a_process_that_stays_after_the_normal_end_is_killed(job: Job) -> None:
    node = job.node(0, 1)
    job.configure()
    with frozen(node.ranks[1].pid):
        assert node.ranks[0].announce_end() is True
        assert node.ranks[1].process.wait(PATIENCE_S) == -signal.SIGKILL
    said = f"rank 1 (pid {node.ranks[1].pid}, node a) has not ended by itself: SIGKILL"
    assert said in node.ranks[0].log.read_text() and not node.ranks[0].saw("root_cause")


def test_the_view_lists_ranks_by_number(job: Job) -> None:
    node = job.node(2, 0)
    node.child("api", "API server")
    late = job.actor("late")
    node.join(late, "rank", "torchrun rank 1", None)

    def names() -> list[str]:
        return [member["name"] for member in node.ranks[0].link("view", PATIENCE_S)["members"]]

    assert names() == ["rank 0", "rank 2", "API server", "torchrun rank 1"]
    late.link("identify", "rank 1", 1)
    assert names() == ["rank 0", "rank 1", "rank 2", "API server"]


def test_the_end_of_the_agent_is_the_first_cause(job: Job) -> None:
    node = job.node(0, 1)
    node.agent.kill()
    assert f"torchrun's agent (pid {node.agent.pid})" in node.ranks[0].expect("root_cause")["cause"]


def test_drain_reaches_every_rank_once(job: Job) -> None:
    node = job.node(0, 1)
    api = node.child("api", "API server")
    job.configure()
    node.ranks[1].link("request_drain", "SIGTERM")
    api.link("request_drain", "second SIGTERM")
    for actor in node.ranks:
        assert actor.expect("drain")["reason"] == "SIGTERM"
    view = node.ranks[0].link("view", PATIENCE_S)
    assert view["draining"] == "SIGTERM" and view["root_cause"] is None
    assert not any(actor.saw("drain") for actor in (*node.ranks, api))


def test_a_drain_before_the_rendezvous_is_passed_to_all_ranks(job: Job) -> None:
    """There is no rank 0 yet that could finish requests."""
    node = job.node(0, 1)
    node.ranks[1].link("request_drain", "SIGTERM")
    assert [rank.expect("drain")["reason"] for rank in node.ranks] == ["SIGTERM", "SIGTERM"]


def test_an_end_that_follows_a_death_is_a_failure(job: Job) -> None:
    """torchrun ends the other ranks of a node when one has died; this is no normal end."""
    node = job.node(0, 1, 2)
    job.configure(grace_s=20.0)  # the ranks below must still run if this test is slow
    node.ranks[2].kill()
    node.ranks[2].process.wait(PATIENCE_S)
    wait_until(
        lambda: _state(node.ranks[0].link("view", PATIENCE_S), "rank 2") == "gone",
        PATIENCE_S,
        "the death to be seen",
    )
    node.ranks[1].link("request_drain", "SIGTERM")
    node.ranks[0].send("announce_end", asdict(End()), 2.0)
    for rank in node.ranks[:2]:
        assert "rank 2" in rank.expect("root_cause")["cause"]
        assert not rank.saw("end") and not rank.saw("drain")


@pytest.mark.parametrize("unserved", [True, False])
def test_normal_end(job: Job, unserved: bool) -> None:
    node = job.node(0, 1)
    job.configure()
    assert node.ranks[0].announce_end(End(code=3, unserved=unserved)) is True
    for actor in node.ranks:
        end = actor.expect("end")
        assert (end["code"], end["unserved"]) == (3, unserved)
    node.ranks[1].kill()
    node.ranks[1].process.wait(PATIENCE_S)
    view = node.ranks[0].link("view", PATIENCE_S)
    assert view["ended"] and view["root_cause"] is None
    node.ranks[0].send("exit", 0)
    job.all_gone()
    assert "failed" not in node.log


def test_leaving_is_no_failure(job: Job) -> None:
    node = job.node(0, 1)
    node.ranks[1].link("leaving")
    node.ranks[1].send("exit", 0)
    node.ranks[1].process.wait(PATIENCE_S)
    wait_until(
        lambda: _state(node.ranks[0].link("view", PATIENCE_S), "rank 1") == "gone", PATIENCE_S, "it is gone"
    )
    assert node.ranks[0].link("view", PATIENCE_S)["root_cause"] is None


def test_the_next_round_at_the_same_address(job: Job) -> None:
    node = job.node(0, 1)
    for actor in node.ranks:
        actor.kill()
        actor.process.wait(PATIENCE_S)
    fresh, other = job.actor("fresh"), job.actor("other")
    address = fresh.do("start_watcher", node.agent.pid, 0, {})
    assert address == node.address
    first = node.join(fresh, "rank", "rank 0", 0)
    assert first != node.watcher_pid and node.join(other, "rank", "rank 1", 1) == first


def test_view(job: Job) -> None:
    node = job.node(0, 1)
    api = node.child("api", "API server")
    job.configure()
    node.ranks[1].do("entry", "state", ["ready"])
    node.ranks[1].do("entry", "step_begin", [])
    node.ranks[1].do("entry", "step_end", [])
    node.ranks[1].do("entry", "step_begin", [])
    node.ranks[0].link("identify", "rank 7", 7)
    view = api.link("view", PATIENCE_S)
    assert view["round_id"] == "0123456789ab" and view["restarts"] == 0 and view["root_cause"] is None
    assert abs(view["clock"] - time.time()) < 60
    assert [(one["node"], one["hostname"], one["ranks"]) for one in view["nodes"]] == [(0, "a", [0, 1])]
    rows = {one["name"]: one for one in view["members"]}
    assert set(rows) == {"rank 7", "rank 1", "API server"}
    one = rows["rank 1"]
    assert (one["kind"], one["rank"], one["hostname"], one["pid"]) == ("rank", 1, "a", node.ranks[1].pid)
    assert (one["state"], one["steps"]) == ("ready", 1)
    assert 0 <= one["in_flight_s"] < 10 and 0 <= one["age_s"] < 10
    assert rows["API server"]["in_flight_s"] is None
    assert {row["name"] for row in fetch_view(node.address, 5.0)["members"]} == set(rows)


def test_no_watcher_at_the_address_is_an_error_at_the_deadline(job: Job) -> None:
    actor = job.actor("lonely")
    with pytest.raises(AssertionError, match="PeerLost: no watcher on this node"):
        actor.do("connect", "@spmd-serve-nobody", {"kind": "rank", "name": "rank 1", "rank": 1}, 0.3, False)
    with pytest.raises(OSError):
        fetch_view("@spmd-serve-nobody", 1.0)
