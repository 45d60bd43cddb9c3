"""Ranks meet for a call: forked processes, a real store, real connections."""

import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import pytest

from spmd_serve.errors import SpmdError, UsageError
from spmd_serve.offline.call_check import Call
from spmd_serve.offline.call_sync import Lines, OutOfStep, open_lines
from spmd_serve.offline.result import Outcome
from spmd_serve.rendezvous.join import connect_store
from spmd_serve.topology import RankInfo
from tests.support.forked import Children, store_server

RANKS = 3
DEADLINE_S = 20.0

Script = Callable[[Lines, int], Any]


def info(rank: int) -> RankInfo:
    return RankInfo(rank, rank, 0, "a", "127.0.0.1", "lo", 1, rank, "m", "cpu")


def first(parts: list[Outcome]) -> Outcome:
    return parts[0]


def together(parts: list[Outcome]) -> Outcome:
    return Outcome([part.value for part in parts])


def call(lines: Lines, number: int, method: str = "generate", **arguments: object) -> None:
    lines.meet(Call.of(number, method, arguments))


def leave(lines: Lines, number: int, action: str = "has closed the LLM") -> None:
    lines.leave(Call(number, action, {}, left=True))
    assert lines.await_end(DEADLINE_S, lambda text: None)


def run(
    scripts: Sequence[Script],
    *,
    drivers: Sequence[int] = (0,),
    timeout_s: float = DEADLINE_S,
    key: bytes | None = None,
) -> list[Any]:
    """What each rank's script returns, or its error as text; and what it said.

    No process ends before all scripts have: who is gone is a lost peer to those who have not read all yet.
    """
    end = get_context("fork").Barrier(len(scripts))

    def rank(port: int, number: int) -> Callable[[], Any]:
        def body() -> Any:
            said: list[str] = []
            lines = open_lines(
                connect_store("127.0.0.1", port, "round_id", DEADLINE_S),
                "meeting/all",
                [info(one) for one in range(len(scripts))],
                info(number),
                drivers,
                round_id="round_id",
                key=key,
                timeout_s=timeout_s,
                join_timeout_s=DEADLINE_S,
                say=said.append,
            )
            try:
                return [scripts[number](lines, number), said]
            except SpmdError as problem:
                return [f"{type(problem).__name__}: {problem}", said]
            finally:
                end.wait(DEADLINE_S)

        return body

    with store_server() as (_, port), Children() as children:
        started = [children.start(rank(port, number)) for number in range(len(scripts))]
        answers = [child.result() for child in started]
    run.said = [said for _, said in answers]  # type: ignore[attr-defined]
    return [answer for answer, _ in answers]


@pytest.mark.parametrize("key", [None, b"secret"])
def test_all_get_the_drivers_result(key: bytes | None) -> None:
    def script(lines: Lines, rank: int) -> Any:
        heard = []
        for number in range(1, 20):
            call(lines, number, prompts=["a"] * number)
            part = Outcome({"call": number, "text": "x" * number**4}) if rank == 0 else None
            heard.append(lines.conclude(part, first, True).take()["call"])
        leave(lines, 20)
        return heard

    assert run([script] * RANKS, key=key) == [list(range(1, 20))] * RANKS


def test_a_single_rank_meets_nobody() -> None:
    def script(lines: Lines, rank: int) -> Any:
        call(lines, 1)
        outcome = lines.conclude(Outcome(5), together, True)
        leave(lines, 2)
        return outcome.take()

    assert run([script]) == [[5]]


def test_several_drivers_results_are_one() -> None:
    def script(lines: Lines, rank: int) -> Any:
        call(lines, 1)
        outcome = lines.conclude(Outcome(f"part of {rank}") if rank != 1 else None, together, True)
        leave(lines, 2)
        return outcome.take()

    assert run([script] * RANKS, drivers=(0, 2)) == [["part of 0", "part of 2"]] * RANKS


def test_a_result_for_the_driver_alone() -> None:
    def script(lines: Lines, rank: int) -> Any:
        call(lines, 1)
        outcome = lines.conclude(Outcome("result") if rank == 0 else None, first, False)
        leave(lines, 2)
        return outcome.take()

    assert run([script] * RANKS) == ["result", None, None]


@pytest.mark.parametrize("to_all", [True, False])
def test_an_error_is_everybodys(to_all: bool) -> None:
    def script(lines: Lines, rank: int) -> Any:
        call(lines, 1)
        try:
            lines.conclude(Outcome(error=ValueError("bad")) if rank == 0 else None, first, to_all).take()
        except ValueError as error:
            text = str(error)
        call(lines, 2)  # and the next call is as good as ever
        answer = lines.conclude(Outcome(7) if rank == 0 else None, first, True).take()
        leave(lines, 3)
        return [text, answer]

    assert run([script] * RANKS) == [["bad", 7]] * RANKS


@pytest.mark.parametrize("to_all", [True, False])
def test_an_error_of_the_merge_is_everybodys(to_all: bool) -> None:
    """A script may catch it on rank 0: nobody may be left waiting."""

    def merge(parts: list[Outcome]) -> Outcome:
        raise ValueError("these do not fit together")

    def script(lines: Lines, rank: int) -> Any:
        call(lines, 1)
        try:
            lines.conclude(Outcome(1) if rank == 0 else None, merge, to_all).take()
        except ValueError as error:
            text = str(error)
        call(lines, 2)
        answer = lines.conclude(Outcome(7) if rank == 0 else None, first, True).take()
        leave(lines, 3)
        return [text, answer]

    assert run([script] * RANKS) == [["these do not fit together", 7]] * RANKS


def test_what_may_not_cross_is_an_error_on_all_ranks() -> None:
    def script(lines: Lines, rank: int) -> Any:
        call(lines, 1)
        try:
            lines.conclude(Outcome(Script) if rank == 0 else None, first, True).take()
        except SpmdError as error:
            return type(error).__name__
        return "nothing"

    assert run([script] * RANKS) == ["RefusedClass"] * RANKS


def test_different_calls() -> None:
    def script(lines: Lines, rank: int) -> Any:
        call(lines, 1, "sleep" if rank == 1 else "generate")

    text = (
        "OutOfStep: the ranks are out of step at call 1: ranks 0, 2 on a: calls generate(); "
        "rank 1 on a: calls sleep()"
    )
    assert run([script] * RANKS) == [text] * RANKS


def test_different_arguments() -> None:
    def script(lines: Lines, rank: int) -> Any:
        call(lines, 1, prompts=["a"] * (rank + 1))

    text = "call 1 of generate(): prompts differs: list of 1 on rank 0 on a; list of 2 on rank 1 on a"
    assert run([script] * 2) == [f"OutOfStep: {text}"] * 2


def test_a_rank_that_calls_nothing_is_named_by_all() -> None:
    def script(lines: Lines, rank: int) -> Any:
        if rank == 1:
            return "was elsewhere"  # its process is there for longer than the others wait
        call(lines, 1)

    text = "OutOfStep: call 1: ranks 0, 2 on a: calls generate(), but rank 1 on a called nothing within 3 s"
    assert run([script] * RANKS, timeout_s=3.0) == [text, "was elsewhere", text]


def test_a_root_that_calls_nothing_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_serve.offline.call_sync.LATER_S", 0.1)

    def script(lines: Lines, rank: int) -> Any:
        if rank == 0:
            return "was elsewhere"
        call(lines, 1)

    answers = run([script] * 2, timeout_s=0.3)
    assert (
        answers[1]
        == "OutOfStep: call 1: rank 1 on a: calls generate(), but rank 0 on a called nothing within 0.3 s"
    )


def test_who_waits_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_serve.offline.call_sync.FIRST_WORD_S", 0.1)

    def script(lines: Lines, rank: int) -> Any:
        if rank == 1:
            time.sleep(6.0)  # the other one may begin to wait seconds later
        call(lines, 1)
        lines.conclude(Outcome(1) if rank == 0 else None, first, True)
        leave(lines, 2)

    run([script] * 2)
    assert "waiting for rank 1 on a to call generate()" in run.said[0]  # type: ignore[attr-defined]


def test_a_member_that_has_left() -> None:
    def script(lines: Lines, rank: int) -> Any:
        if rank == 1:
            lines.leave(Call(1, "has ended its script", {}, left=True))
            return "left"
        call(lines, 1)

    answers = run([script] * 2)
    assert answers == [
        "OutOfStep: the ranks are out of step at call 1: rank 0 on a: calls generate(); "
        "rank 1 on a: has ended its script",
        "left",
    ]


def test_a_root_that_has_left() -> None:
    def script(lines: Lines, rank: int) -> Any:
        if rank == 0:
            return leave(lines, 1, "has closed the LLM")
        errors = []
        for number in (1, 2):
            with pytest.raises(UsageError) as raised:
                call(lines, number)
            errors.append(str(raised.value))
        return errors

    _, (one, two) = run([script] * 2)
    assert one == two.replace("call 2", "call 1")
    assert one.endswith("rank 0 on a: has closed the LLM; rank 1 on a: calls generate()")


def test_out_of_step_is_the_users_mistake() -> None:
    assert issubclass(OutOfStep, UsageError)
