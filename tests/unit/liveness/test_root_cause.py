"""The root cause, members in trouble, and descriptions of failures, with simulated clocks."""

from pathlib import Path

import pytest

from spmd_serve.liveness import RootCause, WatchConfig, descriptions
from spmd_serve.liveness.hang import Limits, Progress, Sighting
from spmd_serve.liveness.head import silence_s
from spmd_serve.liveness.procfs import OomCounter, parse_stat
from spmd_serve.liveness.protocol import beat_s
from spmd_serve.liveness.root_cause import (
    SETTLE_S,
    FailureReport,
    PauseTolerantClock,
    RootCauseArbiter,
    Weight,
    patience_s,
)
from spmd_serve.system.process import Ending
from spmd_serve.wire.lines import MAX_LINE, BadLine, LineBuffer, Seal, pack, unpack


def failure(key: str, weight: Weight, order: int = 0) -> FailureReport:
    return FailureReport(key, weight, f"{key} is gone", None, "a", order)


class TestRootCauseArbiter:
    def test_waits_for_the_settling_time_and_names_the_first(self) -> None:
        arbiter = RootCauseArbiter()
        assert arbiter.root_cause(1000.0) is None and arbiter.due() is None and arbiter.first() is None
        arbiter.add(failure("x", Weight.OWN), 10.0)
        arbiter.add(failure("y", Weight.OWN), 10.1)
        due = 10.0 + SETTLE_S[Weight.OWN]
        assert arbiter.due() == due
        assert arbiter.root_cause(due - 0.01) is None
        assert arbiter.root_cause(due) == failure("x", Weight.OWN)

    def test_a_later_more_causal_one_wins_within_the_window(self) -> None:
        arbiter = RootCauseArbiter()
        arbiter.add(failure("noticed", Weight.PEER), 10.0)
        arbiter.add(failure("node", Weight.NODE), 10.5)
        arbiter.add(failure("killed", Weight.OWN), 11.0)
        first = arbiter.root_cause(11.5)
        assert first is not None and first.key == "killed"

    def test_each_weight_gives_way_to_all_below(self) -> None:
        arbiter = RootCauseArbiter()
        for at, weight in enumerate(reversed(Weight)):
            arbiter.add(failure(weight.name, weight), float(at))
            assert arbiter.first() == failure(weight.name, weight)

    def test_of_one_moment_the_ancestor_is_first(self) -> None:
        arbiter = RootCauseArbiter()
        arbiter.add(failure("engine", Weight.OWN, order=2), 10.0)
        arbiter.add(failure("rank", Weight.OWN, order=0), 10.0)
        arbiter.add(failure("agent", Weight.OWN, order=-1), 10.0)
        first = arbiter.first()
        assert first is not None and first.key == "agent"

    def test_a_key_is_recorded_once_and_can_be_retracted(self) -> None:
        arbiter = RootCauseArbiter()
        assert arbiter.add(failure("x", Weight.HUNG), 10.0)
        assert not arbiter.add(failure("x", Weight.HUNG), 11.0)
        assert arbiter.retract("x") and not arbiter.retract("x")
        assert arbiter.root_cause(100.0) is None and arbiter.reports == []

    def test_extra_time_leaves_the_decision_to_the_head(self) -> None:
        arbiter = RootCauseArbiter()
        arbiter.add(failure("x", Weight.OWN), 10.0, extra_s=1.0)
        assert arbiter.root_cause(11.0) is None
        assert arbiter.root_cause(10.0 + SETTLE_S[Weight.OWN] + 1.0) is not None

    def test_every_death_is_decided_within_2_s(self) -> None:
        assert max(SETTLE_S[weight] for weight in (Weight.OWN, Weight.UNEXPLAINED, Weight.NODE)) < 1.5

    def test_reports_survive_json(self) -> None:
        one = FailureReport("k", Weight.HUNG, "c", 3, "b", 1, 2.5)
        assert FailureReport.from_json(unpack(pack({"t": "a"} | one.to_json()).strip())) == one
        with pytest.raises(ValueError):
            FailureReport.from_json(one.to_json() | {"weight": 99})


def test_the_clock_leaves_out_the_observers_own_pauses() -> None:
    clock = PauseTolerantClock(most=1.0)
    assert clock.tick(1000.0) == 0.0
    assert clock.tick(1000.5) == 0.5
    assert clock.tick(4600.0) == 1.5  # an hour's pause counts as one second
    assert clock.tick(4590.0) == 1.5
    assert clock.now == 1.5


LIMITS = Limits(rank_timeout=10.0, step_timeout=300.0, expect_turns=True)


def seen(progress: Progress, now: float, **changes: object) -> tuple[str, float] | None:
    values: dict[str, object] = {"stopped": False, "started": 0, "done": 0, "turned": 1.0, "state": "ready"}
    progress.see(Sighting(**{**values, **changes}), now)  # type: ignore[arg-type]
    return progress.trouble(LIMITS, now)


class TestProgress:
    def test_an_idle_loop_must_turn(self) -> None:
        progress = Progress()
        for turned in (-2.0, -1.0, 0.0):
            assert seen(progress, turned, turned=turned) is None
        assert seen(progress, 9.9, turned=0.0) is None
        assert seen(progress, 10.0, turned=0.0) == ("idle", 10.0)
        assert seen(progress, 10.5, turned=2.0) is None
        assert seen(progress, 20.4, turned=2.0) is None

    def test_a_driver_that_has_not_settled_after_loading_may_pause_longer(self) -> None:
        progress = Progress()
        assert seen(progress, 0.0) is None
        assert seen(progress, 1.0, turned=2.0) is None
        assert seen(progress, 300.0, turned=2.0) is None
        assert seen(progress, 301.0, turned=2.0) == ("idle", 300.0)

    @pytest.mark.parametrize("state", ["starting", "loading", "stepping", "draining"])
    def test_a_working_rank_need_not_turn(self, state: str) -> None:
        progress = Progress()
        for now in (0.0, 1000.0, 100_000.0):
            assert seen(progress, now, state=state) is None
        assert seen(progress, 100_001.0) is None  # ready from now on, with an old time of its last turn
        assert seen(progress, 100_301.0) == ("idle", 300.0)

    def test_no_rank_need_turn_without_heartbeats(self) -> None:
        progress = Progress()
        seen(progress, 0.0)
        seen(progress, 1000.0)
        assert progress.trouble(Limits(10.0, 300.0, expect_turns=False), 1000.0) is None

    def test_a_step_in_flight_has_its_own_limit(self) -> None:
        progress = Progress()
        assert seen(progress, 0.0, started=41, done=40) is None
        assert seen(progress, 299.0, started=41, done=40) is None
        assert seen(progress, 300.0, started=41, done=40) == ("stuck", 300.0)
        assert seen(progress, 301.0, started=41, done=41) is None

    def test_progress_counts_finished_steps_not_started_ones(self) -> None:
        progress = Progress()
        for now in range(0, 300, 50):
            assert seen(progress, float(now), started=41 + now, done=40) is None
        assert seen(progress, 300.0, started=400, done=40) == ("stuck", 300.0)
        assert seen(progress, 310.0, started=400, done=41) is None
        assert seen(progress, 609.0, started=400, done=41) is None

    def test_the_first_idle_second_counts_from_the_end_of_the_step(self) -> None:
        progress = Progress()
        for turned in (-2.0, -1.0, 0.0):
            seen(progress, turned, turned=turned)
        seen(progress, 0.5, started=1)
        assert seen(progress, 100.0, started=1, done=1) is None
        assert seen(progress, 109.0, started=1, done=1) is None
        assert seen(progress, 110.0, started=1, done=1) == ("idle", 10.0)

    def test_a_stop_counts_from_its_first_sighting(self) -> None:
        progress = Progress()
        assert seen(progress, 0.0, state="loading") is None
        assert seen(progress, 50.0, state="loading", stopped=True) is None
        assert seen(progress, 58.6, state="loading", stopped=True) is None
        assert seen(progress, 58.75, state="loading", stopped=True) == ("stopped", 8.75)
        assert seen(progress, 61.0, state="loading") is None
        assert seen(progress, 62.0, state="loading", stopped=True) is None

    def test_a_driver_must_make_progress_with_its_work(self) -> None:
        progress = Progress()
        assert seen(progress, 0.0, turned=0.0, works_since=7.0) is None
        assert seen(progress, 299.0, turned=299.0, works_since=8.0) is None
        assert (
            seen(progress, 603.9, turned=603.9, works_since=8.0) is None
        )  # a hung rank would be reported first
        assert seen(progress, 604.0, turned=604.0, works_since=8.0) == ("stalled", 305.0)
        assert seen(progress, 605.0, turned=605.0, works_since=9.0) is None

    def test_a_driver_without_work_waits_as_long_as_it_takes(self) -> None:
        progress = Progress()
        seen(progress, 0.0, turned=0.0, works_since=7.0)
        assert seen(progress, 200.0, turned=200.0) is None
        assert seen(progress, 9000.0, turned=9000.0) is None
        assert seen(progress, 9200.0, turned=9200.0, works_since=9.0) is None

    def test_a_driver_whose_ranks_load_waits_as_long_as_it_takes(self) -> None:
        progress = Progress()
        assert seen(progress, 0.0, state="starting", works_since=7.0) is None
        assert seen(progress, 9000.0, state="starting", works_since=7.0) is None
        assert seen(progress, 9001.0, works_since=7.0) is None
        assert seen(progress, 9305.0, turned=9305.0, works_since=7.0) is None
        assert seen(progress, 9306.0, turned=9306.0, works_since=7.0) == ("stalled", 305.0)

    def test_the_plainest_trouble_comes_first(self) -> None:
        progress = Progress()
        seen(progress, 0.0, started=1, stopped=True)
        assert seen(progress, 1000.0, started=1, stopped=True) == ("stopped", 1000.0)


def test_a_drain_may_begin_while_a_member_is_stopped() -> None:
    arbiter = RootCauseArbiter()
    arbiter.add(FailureReport("x stopped", Weight.OWN, "x has been stopped", 1, "a", age_s=8.7), 10.0)
    assert not arbiter.has_death
    arbiter.add(failure("y", Weight.OWN), 10.1)
    assert arbiter.has_death


class TestPatience:
    """The root cause is declared within --rank-timeout; reports come earlier."""

    @pytest.mark.parametrize("rank_timeout", [3.0, 4.0, 10.0, 60.0])
    def test_a_stop_is_declared_within_the_rank_timeout(self, rank_timeout: float) -> None:
        limits = Limits(rank_timeout, 300.0, expect_turns=False)
        first_look = limits.look_s  # the longest time until it is seen at all
        reported = first_look + patience_s(rank_timeout, Weight.OWN, limits.look_s) + limits.look_s
        assert reported + SETTLE_S[Weight.OWN] <= rank_timeout

    @pytest.mark.parametrize("rank_timeout", [9.0, 10.0, 60.0])
    def test_a_silent_node_is_declared_within_the_rank_timeout(self, rank_timeout: float) -> None:
        reported = silence_s(rank_timeout) + beat_s(
            rank_timeout
        )  # a lost head decides nothing: no extra time
        assert reported + SETTLE_S[Weight.NODE] <= rank_timeout

    @pytest.mark.parametrize("rank_timeout", [0.5, 2.0, 5.0])
    def test_a_short_timeout_allows_for_three_heartbeats(self, rank_timeout: float) -> None:
        assert silence_s(rank_timeout) == 0.75 * rank_timeout >= 3 * beat_s(rank_timeout) * 0.99


class TestDescriptions:
    def test_nodes(self) -> None:
        assert descriptions.node("b", [4, 5]) == "node b (ranks 4-5)"

    def test_seconds(self) -> None:
        texts = [descriptions.seconds(value) for value in (0.5, 1.04, 1.5, 10.2, 300.4)]
        assert texts == ["0.5 s", "1 s", "1.5 s", "10 s", "300 s"]

    def test_ends(self) -> None:
        who = descriptions.member("rank 3", 123, "b")
        assert (
            descriptions.ended(who, None, False)
            == "rank 3 (pid 123, node b) was killed or crashed without reporting an error"
        )
        assert descriptions.ended(who, Ending(None, 9), True) == (
            "rank 3 (pid 123, node b) was killed by SIGKILL; the kernel's OOM killer was active on that node"
        )
        assert descriptions.ended(who, Ending(None, 99), False).endswith("was killed by signal 99")
        assert descriptions.ended(who, Ending(7, None), False).endswith(
            "ended with exit code 7 and reported no error"
        )

    def test_a_lost_node_was_silent_or_its_watcher_is_gone(self) -> None:
        assert "its watcher is gone (killed" in descriptions.node_lost("node b", 0.5, 10.0)
        assert descriptions.node_lost("node b", 9.9, 10.0).startswith("node b has been silent for 9.9 s")

    def test_reports_are_one_line(self) -> None:
        assert descriptions.own_report("rank 1", "ValueError:\n  bad\n") == "rank 1: ValueError: bad"


class TestWire:
    def test_lines_are_put_together(self) -> None:
        lines = LineBuffer()
        lines.feed(b'{"a"')
        assert lines.take() == []
        lines.feed(b":1}\n{}\n{")
        assert lines.take() == [b'{"a":1}', b"{}"] and lines.take() == []

    def test_a_line_without_end_is_refused(self) -> None:
        with pytest.raises(BadLine):
            LineBuffer(longest=10).feed(b"x" * 11)
        LineBuffer().feed(b"x" * MAX_LINE)

    @pytest.mark.parametrize("line", [b"", b"GET /", b"[1]", b'{"a":1}', b'{"t":1}', b"\xff", b"[" * 100_000])
    def test_what_is_no_message_is_refused(self, line: bytes) -> None:
        with pytest.raises(BadLine):
            unpack(line)

    def pair(self, here: str | None, there: str | None) -> tuple[Seal, Seal]:
        a, b = Seal(here, "head", "node"), Seal(there, "node", "head")
        for seal in (a, b):
            seal.mix("one")
            seal.mix("two")
        return a, b

    @pytest.mark.parametrize("key", [None, "secret"])
    def test_sealed_lines_arrive(self, key: str | None) -> None:
        a, b = self.pair(key, key)
        for number in range(3):
            assert b.open(a.wrap({"t": "x", "n": number})[:-1]) == {"t": "x", "n": number}
            assert a.open(b.wrap({"t": "y", "n": number})[:-1]) == {"t": "y", "n": number}

    @pytest.mark.parametrize(("here", "there"), [("secret", "other"), ("secret", None), (None, "secret")])
    def test_another_key_or_none_is_refused(self, here: str | None, there: str | None) -> None:
        a, b = self.pair(here, there)
        with pytest.raises(BadLine):
            b.open(a.wrap({"t": "x"})[:-1])

    def test_replayed_reflected_reordered_or_changed_lines_are_refused(self) -> None:
        for attack in ("replay", "reflect", "reorder", "change", "other connection"):
            a, b = self.pair("secret", "secret")
            first, second = a.wrap({"t": "x", "n": 1})[:-1], a.wrap({"t": "x", "n": 2})[:-1]
            if attack == "replay":
                b.open(first)
                victim, line = b, first
            elif attack == "reflect":
                victim, line = a, first
            elif attack == "reorder":
                victim, line = b, second
            elif attack == "change":
                victim, line = b, first.replace(b"1", b"2")
            else:
                victim, line = Seal("secret", "node", "head"), first
                victim.mix("one")
                victim.mix("three")
            with pytest.raises(BadLine):
                victim.open(line)


class TestRecords:
    CONFIG = WatchConfig(1, ("a", "b"), ((0, 1), (2, 3)), "10.0.0.1", 4711, "gen", key="k")

    def test_records_survive_json(self) -> None:
        assert WatchConfig.from_json(unpack(pack({"t": "c"} | self.CONFIG.to_json())[:-1])) == self.CONFIG
        root_cause = RootCause("rank 1 is gone", 1, "a", 123.0, None)
        assert RootCause.from_json(root_cause.to_json()) == root_cause

    @pytest.mark.parametrize(
        "wrong", [{"node": 2}, {"hostnames": ("a",)}, {"rank_timeout": 0.0}, {"grace_s": -1.0}]
    )
    def test_invalid_values_are_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(ValueError):
            WatchConfig.from_json(self.CONFIG.to_json() | wrong)


class TestProc:
    # Behind the name: state, 5 fields, flags, 4 fields, user and system ticks, 6 fields, start, 29 fields,
    # status.
    LINE = (
        b"42 (a) b (c) T"
        + b" 1" * 5
        + b" 4194560"
        + b" 0" * 4
        + b" 150 50"
        + b" 0" * 6
        + b" 777"
        + b" 0" * 29
        + b" 9\n"
    )

    def test_stat(self) -> None:
        look = parse_stat(self.LINE)
        assert (look.state, look.dying, look.started_ticks, look.wait_status) == ("T", False, 777, 9)
        assert look.cpu_s == pytest.approx(2.0)
        assert parse_stat(self.LINE.replace(b") T", b") Z")).dying
        assert parse_stat(self.LINE.replace(b"4194560", b"4194564")).dying

    def test_oom_counter(self, tmp_path: Path) -> None:
        events = tmp_path / "memory.events"
        counter = OomCounter([tmp_path / "missing", events])
        assert not counter.has_risen()
        events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
        assert counter.has_risen() and not counter.has_risen()

    def test_wait_status(self) -> None:
        assert Ending.of_wait_status(9) == Ending(None, 9)
        assert Ending.of_wait_status(0x80 | 11) == Ending(None, 11)
        assert Ending.of_wait_status(3 << 8) == Ending(3, None)
        assert Ending.of_wait_status(0) == Ending(0, None)
