"""Synchronized calls: forked processes, a real store, real connections."""

import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import pytest

from spmd_serve.errors import SpmdError, UsageError
from spmd_serve.offline.call_check import Call
from spmd_serve.offline.call_sync import CallSync, OutOfStep, open_call_sync
from spmd_serve.offline.result import CallResult
from spmd_serve.rendezvous.join import connect_store
from spmd_serve.topology import RankInfo
from tests.support.forked import Children, store_server

RANKS = 3
DEADLINE_S = 20.0

Script = Callable[[CallSync, int], Any]


def info(rank: int) -> RankInfo:
    return RankInfo(rank, rank, 0, "a", "127.0.0.1", "lo", 1, rank, "m", "cpu")


def first(parts: list[CallResult]) -> CallResult:
    return parts[0]


def together(parts: list[CallResult]) -> CallResult:
    return CallResult([part.value for part in parts])


def call(sync: CallSync, number: int, method: str = "generate", **arguments: object) -> None:
    sync.begin(Call.of(number, method, arguments))


def leave(sync: CallSync, number: int, action: str = "has closed the LLM") -> None:
    sync.leave(Call(number, action, {}, left=True))
    assert sync.await_end(DEADLINE_S, lambda text: None)


def run(
    scripts: Sequence[Script],
    *,
    drivers: Sequence[int] = (0,),
    timeout_s: float = DEADLINE_S,
    key: bytes | None = None,
) -> list[Any]:
    """Return each rank's result, or its error as text; keep the log lines in `run.said`.

    No process ends before all scripts have ended: a rank that is still reading would report a lost peer.
    """
    end = get_context("fork").Barrier(len(scripts))

    def rank(port: int, number: int) -> Callable[[], Any]:
        def body() -> Any:
            said: list[str] = []
            sync = open_call_sync(
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
                return [scripts[number](sync, number), said]
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
    def script(sync: CallSync, rank: int) -> Any:
        received = []
        for number in range(1, 20):
            call(sync, number, prompts=["a"] * number)
            part = CallResult({"call": number, "text": "x" * number**4}) if rank == 0 else None
            received.append(sync.finish(part, first, True).take()["call"])
        leave(sync, 20)
        return received

    assert run([script] * RANKS, key=key) == [list(range(1, 20))] * RANKS


def test_a_single_rank_waits_for_no_other() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        call(sync, 1)
        result = sync.finish(CallResult(5), together, True)
        leave(sync, 2)
        return result.take()

    assert run([script]) == [[5]]


def test_several_drivers_results_are_one() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        call(sync, 1)
        result = sync.finish(CallResult(f"part of {rank}") if rank != 1 else None, together, True)
        leave(sync, 2)
        return result.take()

    assert run([script] * RANKS, drivers=(0, 2)) == [["part of 0", "part of 2"]] * RANKS


def test_a_result_for_the_driver_alone() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        call(sync, 1)
        result = sync.finish(CallResult("result") if rank == 0 else None, first, False)
        leave(sync, 2)
        return result.take()

    assert run([script] * RANKS) == ["result", None, None]


@pytest.mark.parametrize("to_all", [True, False])
def test_an_error_is_raised_on_all_ranks(to_all: bool) -> None:
    def script(sync: CallSync, rank: int) -> Any:
        call(sync, 1)
        try:
            sync.finish(CallResult(error=ValueError("bad")) if rank == 0 else None, first, to_all).take()
        except ValueError as error:
            text = str(error)
        call(sync, 2)  # the next call works
        answer = sync.finish(CallResult(7) if rank == 0 else None, first, True).take()
        leave(sync, 3)
        return [text, answer]

    assert run([script] * RANKS) == [["bad", 7]] * RANKS


@pytest.mark.parametrize("to_all", [True, False])
def test_an_error_of_the_merge_is_raised_on_all_ranks(to_all: bool) -> None:
    """A script may catch it on rank 0: no rank may be left waiting."""

    def merge(parts: list[CallResult]) -> CallResult:
        raise ValueError("these do not fit together")

    def script(sync: CallSync, rank: int) -> Any:
        call(sync, 1)
        try:
            sync.finish(CallResult(1) if rank == 0 else None, merge, to_all).take()
        except ValueError as error:
            text = str(error)
        call(sync, 2)
        answer = sync.finish(CallResult(7) if rank == 0 else None, first, True).take()
        leave(sync, 3)
        return [text, answer]

    assert run([script] * RANKS) == [["these do not fit together", 7]] * RANKS


def test_what_may_not_cross_is_an_error_on_all_ranks() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        call(sync, 1)
        try:
            sync.finish(CallResult(Script) if rank == 0 else None, first, True).take()
        except SpmdError as error:
            return type(error).__name__
        return "nothing"

    assert run([script] * RANKS) == ["RefusedClass"] * RANKS


def test_different_calls() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        call(sync, 1, "sleep" if rank == 1 else "generate")

    text = (
        "OutOfStep: the ranks are out of step at call 1: ranks 0, 2 on a: calls generate(); "
        "rank 1 on a: calls sleep()"
    )
    assert run([script] * RANKS) == [text] * RANKS


def test_different_arguments() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        call(sync, 1, prompts=["a"] * (rank + 1))

    text = "call 1 of generate(): prompts differs: list of 1 on rank 0 on a; list of 2 on rank 1 on a"
    assert run([script] * 2) == [f"OutOfStep: {text}"] * 2


def test_a_rank_that_calls_nothing_is_named_by_all() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        if rank == 1:
            return "was elsewhere"  # its process is there for longer than the others wait
        call(sync, 1)

    text = "OutOfStep: call 1: ranks 0, 2 on a: calls generate(), but rank 1 on a called nothing within 3 s"
    assert run([script] * RANKS, timeout_s=3.0) == [text, "was elsewhere", text]


def test_a_root_that_calls_nothing_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_serve.offline.call_sync.EXTRA_WAIT_S", 0.1)

    def script(sync: CallSync, rank: int) -> Any:
        if rank == 0:
            return "was elsewhere"
        call(sync, 1)

    answers = run([script] * 2, timeout_s=0.3)
    assert (
        answers[1]
        == "OutOfStep: call 1: rank 1 on a: calls generate(), but rank 0 on a called nothing within 0.3 s"
    )


def test_a_wait_is_logged_with_the_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd_serve.rendezvous.store.FIRST_WORD_S", 0.1)

    def script(sync: CallSync, rank: int) -> Any:
        if rank == 1:
            time.sleep(6.0)  # the other one may begin to wait seconds later
        call(sync, 1)
        sync.finish(CallResult(1) if rank == 0 else None, first, True)
        leave(sync, 2)

    run([script] * 2)
    first_line = run.said[0][0]  # type: ignore[attr-defined]
    assert first_line.startswith("waiting for rank 1 on a to call generate()")


def test_a_member_that_has_left() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        if rank == 1:
            sync.leave(Call(1, "has ended its script", {}, left=True))
            return "left"
        call(sync, 1)

    answers = run([script] * 2)
    assert answers == [
        "OutOfStep: the ranks are out of step at call 1: rank 0 on a: calls generate(); "
        "rank 1 on a: has ended its script",
        "left",
    ]


def test_a_root_that_has_left() -> None:
    def script(sync: CallSync, rank: int) -> Any:
        if rank == 0:
            return leave(sync, 1, "has closed the LLM")
        errors = []
        for number in (1, 2):
            with pytest.raises(UsageError) as raised:
                call(sync, number)
            errors.append(str(raised.value))
        return errors

    _, (one, two) = run([script] * 2)
    assert one == two.replace("call 2", "call 1")
    assert one.endswith("rank 0 on a: has closed the LLM; rank 1 on a: calls generate()")


def test_out_of_step_is_the_users_mistake() -> None:
    assert issubclass(OutOfStep, UsageError)
