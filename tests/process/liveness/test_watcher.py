"""One host: real members, real kill -9, SIGSTOP and hangs, and what the others are told, and when."""

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
from tests.support.liveness import PATIENCE_S, Actor, Host, Job
from tests.support.view import fetch_view

TOLD_S = 10.0
"""0.4 s on a quiet machine. A starved one may take longer; silence alone would take `QUIET_S`."""
DRIVER_S = 5.0
"""Longer than an engine core's loop stands still until the verdict with --step-timeout 0.5, seconds."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as running:
        yield running


def test_kill_9_is_told_to_the_others_at_once(job: Job) -> None:
    host = job.host(0, 1)
    engine = host.child("engine", "engine core")
    job.configure()
    at = host.ranks[1].kill()
    for actor in (host.ranks[0], engine):
        root_cause = actor.expect("root_cause")
        print(f"told after {root_cause['at'] - at:.3f} s")
        assert root_cause["at"] - at < TOLD_S
        assert root_cause["cause"] == f"rank 1 (pid {host.ranks[1].pid}, node a) was killed by SIGKILL"
        assert (root_cause["rank"], root_cause["hostname"]) == (1, "a")
    job.all_gone()  # the watcher ends whoever does not end by itself, then itself


def test_the_default_answer_is_one_line_and_exit_code_1(job: Job) -> None:
    host = job.host(0)
    other = job.actor("other")
    host.join(other, "rank", "rank 1", 1, default_callback=True)
    host.ranks[0].kill()
    assert other.process.wait(PATIENCE_S) == 1
    assert other.log.read_text().count("rank 0 (pid") == 1
    # Behind all that the members print, the watcher says it once per host.
    wait_until(lambda: host.log.endswith(" was killed by SIGKILL\n"), PATIENCE_S, "the watcher's last line")
    assert host.log.count("spmd_serve watcher: the job has failed: rank 0 (") == 1


def test_death_before_the_rendezvous_and_of_the_watchers_parent(job: Job) -> None:
    host = job.host(0, 1)
    at = host.ranks[0].kill()
    root_cause = host.ranks[1].expect("root_cause")
    assert "rank 0" in root_cause["cause"] and root_cause["at"] - at < TOLD_S


@pytest.mark.parametrize(
    ("command", "text"),
    [(("exit", 3), "ended with exit code 3 and reported no error"), (("crash",), "was killed by SIGSEGV")],
)
def test_an_end_without_a_word_says_how(job: Job, command: tuple[object, ...], text: str) -> None:
    host = job.host(0, 1)
    host.ranks[1].send(str(command[0]), *command[1:])
    assert text in host.ranks[0].expect("root_cause")["cause"]


def test_the_end_is_seen_though_a_forked_child_holds_the_descriptors(job: Job) -> None:
    host = job.host(0, 1)
    child = look(host.ranks[1].do("fork_child", False))
    assert child is not None
    try:
        at = host.ranks[1].kill()
        root_cause = host.ranks[0].expect("root_cause")
        assert root_cause["at"] - at < TOLD_S and "SIGKILL" in root_cause["cause"]  # not what the child said
        job.kill_actors()
        job.all_gone()
    finally:
        child.signal(signal.SIGKILL)


def test_a_members_own_report_wins_over_its_consequences(job: Job) -> None:
    host = job.host(0, 1)
    with frozen(host.watcher_pid):  # so that it does not judge before it can have heard the second one
        host.ranks[0].send("fail_and_exit", "Connection closed by peer", True, 1)
        host.ranks[0].process.wait(PATIENCE_S)
        host.ranks[1].link("failed", "ValueError: bad weights")
    root_cause = host.ranks[1].expect("root_cause")
    assert root_cause["cause"].endswith("ValueError: bad weights") and root_cause["rank"] == 1


def test_a_report_wins_over_an_end_without_a_word(job: Job) -> None:
    host = job.host(0, 1)
    with frozen(host.watcher_pid):  # so that it hears of both at one moment
        host.ranks[0].send("exit", 1)
        host.ranks[0].process.wait(PATIENCE_S)
        host.ranks[1].link("failed", "ValueError: bad weights")
    assert host.ranks[1].expect("root_cause")["rank"] == 1


def test_children_that_die_with_their_rank_do_not_hide_it(job: Job) -> None:
    host = job.host(0, 1)
    engine = host.child("engine", "engine core")
    with frozen(host.watcher_pid):
        engine.kill()
        engine.process.wait(PATIENCE_S)
        host.ranks[1].kill()
        host.ranks[1].process.wait(PATIENCE_S)
    assert host.ranks[0].expect("root_cause")["rank"] == 1


def test_sigstop_is_seen_after_rank_timeout_and_slow_ranks_are_left_alone(job: Job) -> None:
    host = job.host(0, 1, 2)
    job.configure(rank_timeout=3.0, expect_turns=True)
    for actor in host.ranks:
        actor.do("entry", "state", ["loading"])
    host.ranks[0].send("burn_holding_gil", 3.5)
    host.ranks[1].send("hold_gil", 3.5)
    host.ranks[0].answer()
    host.ranks[1].answer()
    view = host.ranks[2].link("view", PATIENCE_S)
    assert view["root_cause"] is None
    assert not any(actor.saw("root_cause") for actor in host.ranks)
    at = host.ranks[1].kill(signal.SIGSTOP)
    root_cause = host.ranks[2].expect("root_cause")
    print(f"SIGSTOP told after {root_cause['at'] - at:.3f} s")
    assert 1.5 <= root_cause["at"] - at < 15.0
    assert "rank 1 " in root_cause["cause"] and "has been stopped (SIGSTOP) for" in root_cause["cause"]
    assert root_cause["detect_s"] >= 1.5
    job.kill_actors()
    job.all_gone()


def test_a_short_stop_is_forgiven(job: Job) -> None:
    host = job.host(0, 1)
    job.configure(rank_timeout=6.0)
    host.ranks[1].kill(signal.SIGSTOP)
    wait_until(
        lambda: _state(host.ranks[0].link("view", PATIENCE_S), "rank 1") == "stopped",
        PATIENCE_S,
        "the stop shows in the view",
    )
    host.ranks[1].kill(signal.SIGCONT)
    wait_until(
        lambda: _state(host.ranks[0].link("view", PATIENCE_S), "rank 1") == "starting",
        PATIENCE_S,
        "it runs again",
    )
    assert host.ranks[1].link("view", PATIENCE_S)["root_cause"] is None


def _state(view: dict[str, list[dict[str, object]]], name: str) -> object:
    return next(member["state"] for member in view["members"] if member["name"] == name)


def test_a_hung_step_fails_after_step_timeout_with_stacks(job: Job) -> None:
    host = job.host(0, 1)
    job.configure(step_timeout=1.0)
    with frozen(host.watcher_pid):  # so that it sees the last step only, however long the others take
        for _ in range(40):
            host.ranks[1].do("entry", "step_begin", [])
            host.ranks[1].do("entry", "step_end", [])
        host.ranks[1].do("entry", "step_begin", [])
        host.ranks[1].send("hold_gil", 30)  # its stacks come all the same
        at = time.monotonic()
    root_cause = host.ranks[0].expect("root_cause")
    assert 1.0 <= root_cause["at"] - at < 15.0
    assert "rank 1 " in root_cause["cause"] and "step 41 has made no progress for" in root_cause["cause"]
    for actor in host.ranks:
        actor.wait_stacks()
    assert "hold_gil" in host.ranks[1].log.read_text()
    job.kill_actors()
    job.all_gone()


def test_a_step_that_ends_after_all_is_no_failure(job: Job) -> None:
    host = job.host(0, 1)
    job.configure(rank_timeout=8.0, step_timeout=1.0)
    host.ranks[1].do("entry", "step_begin", [])
    wait_until(lambda: "asking" in host.log, PATIENCE_S, "stacks are asked for")
    with frozen(host.watcher_pid):  # so that it does not judge before a starved rank has ended its step
        host.ranks[1].do("entry", "step_end", [])
    time.sleep(2.5)  # longer than the accusation takes to become a verdict
    assert host.ranks[0].link("view", PATIENCE_S)["root_cause"] is None


def test_who_has_reset_the_signal_is_not_ended_by_the_question_for_stacks(job: Job) -> None:
    host = job.host(0, 1)
    host.ranks[0].do("reset_stacks_signal")  # after its hello
    again = job.actor("again")
    host.join(again, "rank", "rank 2", 2)
    again.do("reset_stacks_signal")
    host.join(again, "api", "API server")  # registers anew
    job.configure(step_timeout=0.5)
    host.ranks[1].do("entry", "step_begin", [])
    assert "rank 1 " in host.ranks[0].expect("root_cause")["cause"]
    again.wait_stacks()
    assert "hread 0x" not in host.ranks[0].log.read_text()


def test_an_idle_loop_that_does_not_turn_is_hung_but_not_while_it_steps(job: Job) -> None:
    host = job.host(0, 1, 2)
    job.configure(rank_timeout=3.0, expect_turns=True)
    stepping, turning, stuck = host.ranks
    stepping.do("entry", "step_begin", [])
    for actor in host.ranks:
        actor.do("entry", "state", ["ready"])
    turning.do("turn_forever", 0.1)
    stuck.do("turn_forever", 0.1)
    time.sleep(4.0)  # not a synchronisation: the watcher has to see some turns first
    at = time.monotonic()
    stuck.send("burn_holding_gil", 30.0)  # a sleep would end with the signal that asks for stacks
    root_cause = turning.expect("root_cause")
    assert "rank 2 " in root_cause["cause"] and "its loop has not turned" in root_cause["cause"]
    assert root_cause["at"] - at < 15.0


def loaded(job: Job, step_timeout: float) -> tuple[Host, Actor]:
    """A host of two ranks, and its engine core, whose ranks are loaded."""
    host = job.host(0, 1)
    engine = host.child("engine", "engine core")
    job.configure(step_timeout=step_timeout)
    engine.do("entry", "state", ["ready"])
    return host, engine


def test_an_engine_core_that_does_not_get_on_with_its_work_is_hung(job: Job) -> None:
    """Although it sends heartbeats; and no rank is in a step, which would explain it."""
    host, engine = loaded(job, step_timeout=0.5)
    engine.do("entry", "works", [])
    engine.do("entry", "waits", [])
    at = time.monotonic()
    time.sleep(DRIVER_S)  # not a synchronisation: time in which waiting would count, if it did
    assert host.ranks[0].link("view", PATIENCE_S)["root_cause"] is None
    engine.do("entry", "works", [])
    root_cause = host.ranks[0].expect("root_cause")
    assert root_cause["at"] - at > DRIVER_S + 4.0
    assert (
        f"engine core (pid {engine.pid}, node a) hung: its loop has made no progress" in root_cause["cause"]
    )
    engine.wait_stacks()


def test_a_reply_that_never_comes_is_blamed_on_its_rank(job: Job) -> None:
    host, engine = loaded(job, step_timeout=0.5)
    engine.do("entry", "awaits", [1])
    root_cause = host.ranks[0].expect("root_cause")
    assert root_cause["cause"].startswith(
        f"rank 1 (node a) hung: engine core (pid {engine.pid}, node a) has waited "
    )
    assert (root_cause["rank"], root_cause["hostname"]) == (1, "a")


def test_a_rank_that_hangs_explains_an_engine_core_that_waits_for_it(job: Job) -> None:
    """Also when that began to wait seconds before."""
    host, engine = loaded(job, step_timeout=2.0)
    engine.do("entry", "awaits", [0])
    time.sleep(1.5)  # the rank's delay, to which 3 s more may be added before the engine core is to blame
    host.ranks[1].do("entry", "step_begin", [])
    assert "rank 1 (" in engine.expect("root_cause")["cause"]


def test_the_watcher_killed_ends_its_members(job: Job) -> None:
    host = job.host(0, 1)
    job.configure()
    at = time.monotonic()
    os.kill(host.watcher_pid, signal.SIGKILL)
    for actor in host.ranks:
        root_cause = actor.expect("root_cause")
        assert root_cause["cause"] == "the watcher on node a is gone" and root_cause["at"] - at < TOLD_S


def test_a_stopped_watcher_ends_its_members_and_is_ended_by_them(job: Job) -> None:
    host = job.host(0, 1)
    job.configure(rank_timeout=3.0)
    watcher = look(host.watcher_pid)
    assert watcher is not None
    os.kill(host.watcher_pid, signal.SIGSTOP)
    causes = {actor.expect("root_cause")["cause"] for actor in host.ranks}
    assert any("the watcher on node a has been silent for" in cause for cause in causes)
    assert_gone([watcher], 10.0)


def test_a_stopped_watcher_does_not_outlive_its_members(job: Job) -> None:
    host = job.host(0, 1)
    os.kill(host.watcher_pid, signal.SIGSTOP)
    for actor in host.ranks:
        actor.kill()
    job.all_gone()  # its parent's death wakes it


def test_signals_of_the_terminal_do_not_end_the_watcher(job: Job) -> None:
    host = job.host(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(host.watcher_pid, number)
    assert host.ranks[0].link("view", PATIENCE_S)["root_cause"] is None
    assert os.getpgid(host.watcher_pid) != os.getpgid(host.ranks[0].pid)
    with open(f"/proc/{host.watcher_pid}/comm") as comm:
        assert comm.read() == "spmd-watcher\n"


def test_the_watcher_goes_when_nobody_ever_connected(job: Job) -> None:
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
def test_who_stays_after_the_normal_end_is_killed(job: Job) -> None:
    host = job.host(0, 1)
    job.configure()
    with frozen(host.ranks[1].pid):
        assert host.ranks[0].announce_end() is True
        assert host.ranks[1].process.wait(PATIENCE_S) == -signal.SIGKILL
    said = f"rank 1 (pid {host.ranks[1].pid}, node a) has not ended by itself: SIGKILL"
    assert said in host.ranks[0].log.read_text() and not host.ranks[0].saw("root_cause")


def test_the_view_lists_ranks_by_number_whoever_came_first(job: Job) -> None:
    host = job.host(2, 0)
    host.child("api", "API server")
    late = job.actor("late")
    host.join(late, "rank", "torchrun rank 1", None)

    def names() -> list[str]:
        return [member["name"] for member in host.ranks[0].link("view", PATIENCE_S)["members"]]

    assert names() == ["rank 0", "rank 2", "API server", "torchrun rank 1"]
    late.link("identify", "rank 1", 1)
    assert names() == ["rank 0", "rank 1", "rank 2", "API server"]


def test_the_end_of_the_agent_is_the_first_cause(job: Job) -> None:
    host = job.host(0, 1)
    host.agent.kill()
    assert f"torchrun's agent (pid {host.agent.pid})" in host.ranks[0].expect("root_cause")["cause"]


def test_drain_reaches_every_rank_once(job: Job) -> None:
    host = job.host(0, 1)
    api = host.child("api", "API server")
    job.configure()
    host.ranks[1].link("request_drain", "SIGTERM")
    api.link("request_drain", "SIGTERM again")
    for actor in host.ranks:
        assert actor.expect("drain")["reason"] == "SIGTERM"
    view = host.ranks[0].link("view", PATIENCE_S)
    assert view["draining"] == "SIGTERM" and view["root_cause"] is None
    assert not any(actor.saw("drain") for actor in (*host.ranks, api))


def test_drain_before_the_ranks_have_met_is_told_to_all(job: Job) -> None:
    """There is no rank 0 yet that could finish anything."""
    host = job.host(0, 1)
    host.ranks[1].link("request_drain", "SIGTERM")
    assert [rank.expect("drain")["reason"] for rank in host.ranks] == ["SIGTERM", "SIGTERM"]


def test_an_end_that_follows_a_death_is_a_failure(job: Job) -> None:
    """torchrun ends the other ranks of a host when one has died: that is not what they were asked to do."""
    host = job.host(0, 1, 2)
    job.configure(grace_s=20.0)  # those who are asked below are to be there still, should we be late
    host.ranks[2].kill()
    host.ranks[2].process.wait(PATIENCE_S)
    wait_until(
        lambda: _state(host.ranks[0].link("view", PATIENCE_S), "rank 2") == "gone",
        PATIENCE_S,
        "the death to be seen",
    )
    host.ranks[1].link("request_drain", "SIGTERM")
    host.ranks[0].send("announce_end", asdict(End()), 2.0)
    for rank in host.ranks[:2]:
        assert "rank 2" in rank.expect("root_cause")["cause"]
        assert not rank.saw("end") and not rank.saw("drain")


@pytest.mark.parametrize("unserved", [True, False])
def test_normal_end(job: Job, unserved: bool) -> None:
    host = job.host(0, 1)
    job.configure()
    assert host.ranks[0].announce_end(End(code=3, unserved=unserved)) is True
    for actor in host.ranks:
        end = actor.expect("end")
        assert (end["code"], end["unserved"]) == (3, unserved)
    host.ranks[1].kill()
    host.ranks[1].process.wait(PATIENCE_S)
    view = host.ranks[0].link("view", PATIENCE_S)
    assert view["ended"] and view["root_cause"] is None
    host.ranks[0].send("exit", 0)
    job.all_gone()
    assert "failed" not in host.log


def test_leaving_is_no_failure(job: Job) -> None:
    host = job.host(0, 1)
    host.ranks[1].link("leaving")
    host.ranks[1].send("exit", 0)
    host.ranks[1].process.wait(PATIENCE_S)
    wait_until(
        lambda: _state(host.ranks[0].link("view", PATIENCE_S), "rank 1") == "gone", PATIENCE_S, "it is gone"
    )
    assert host.ranks[0].link("view", PATIENCE_S)["root_cause"] is None


def test_the_next_round_at_the_same_address(job: Job) -> None:
    host = job.host(0, 1)
    for actor in host.ranks:
        actor.kill()
        actor.process.wait(PATIENCE_S)
    fresh, other = job.actor("fresh"), job.actor("other")
    address = fresh.do("start_watcher", host.agent.pid, 0, {})
    assert address == host.address
    first = host.join(fresh, "rank", "rank 0", 0)
    assert first != host.watcher_pid and host.join(other, "rank", "rank 1", 1) == first


def test_view(job: Job) -> None:
    host = job.host(0, 1)
    api = host.child("api", "API server")
    job.configure()
    host.ranks[1].do("entry", "state", ["ready"])
    host.ranks[1].do("entry", "step_begin", [])
    host.ranks[1].do("entry", "step_end", [])
    host.ranks[1].do("entry", "step_begin", [])
    host.ranks[0].link("identify", "rank 7", 7)
    view = api.link("view", PATIENCE_S)
    assert view["round_id"] == "0123456789ab" and view["restarts"] == 0 and view["root_cause"] is None
    assert abs(view["clock"] - time.time()) < 60
    assert [(one["node"], one["hostname"], one["ranks"]) for one in view["nodes"]] == [(0, "a", [0, 1])]
    rows = {one["name"]: one for one in view["members"]}
    assert set(rows) == {"rank 7", "rank 1", "API server"}
    one = rows["rank 1"]
    assert (one["kind"], one["rank"], one["hostname"], one["pid"]) == ("rank", 1, "a", host.ranks[1].pid)
    assert (one["state"], one["steps"]) == ("ready", 1)
    assert 0 <= one["in_flight_s"] < 10 and 0 <= one["age_s"] < 10
    assert rows["API server"]["in_flight_s"] is None
    assert {row["name"] for row in fetch_view(host.address, 5.0)["members"]} == set(rows)


def test_nobody_at_the_address_is_an_error_at_the_deadline(job: Job) -> None:
    actor = job.actor("early")
    with pytest.raises(AssertionError, match="PeerLost: no watcher on this node"):
        actor.do("connect", "@spmd-serve-nobody", {"kind": "rank", "name": "rank 1", "rank": 1}, 0.3, False)
    with pytest.raises(OSError):
        fetch_view("@spmd-serve-nobody", 1.0)
