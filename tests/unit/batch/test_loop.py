"""The run with a fake engine: every line answered once, whatever is wrong with it, and however often it is
begun.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from spmd_serve.batch import BatchLine, finish_batch, loop, prepare, run_batch
from spmd_serve.batch.request_lines import error_output
from spmd_serve.errors import ExitCode, PeerLost, UsageError
from spmd_serve.system.signals import Echo
from tests.support.batch import DEADLINE_S, Engine, Place, backwards, good_output, request


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_all_answered(place: Place) -> None:
    place.put_many(100)
    engine = Engine()
    assert place.run(engine, max_in_flight=7) == ExitCode.OK
    assert {line["response"]["body"]["echo"]["value"] for line in place.lines()} == set(range(1, 101))
    assert Counter(engine.asked) == Counter(range(1, 101))
    assert engine.most == 7
    assert (
        place.said[-1].startswith(f"{place.output}: 100 lines: 100 answered, 0 failed; ")
        and "200 tokens in" in (place.said[-1])
    )


def test_answers_are_on_disk_within_a_second(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop.SYNC_INTERVAL_S <= 1
    monkeypatch.setattr(loop, "SYNC_INTERVAL_S", 0.01)
    place.put_many(2)
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number == 2:
            monkeypatch.setattr(os, "fsync", fsync)
            while len(synced) < 2:
                await asyncio.sleep(0.01)
        return good_output(line)

    assert place.run(Engine(reply)) == ExitCode.OK
    assert synced == ["out.jsonl", "out.jsonl.state"] * 2, "once while running, once at the end"


def test_nothing_is_done_twice(place: Place) -> None:
    place.put_many(20)
    assert place.run(Engine()) == ExitCode.OK
    before = place.output.read_bytes()
    again = Engine()
    assert place.run(again) == ExitCode.OK
    assert again.asked == [] and place.output.read_bytes() == before
    prepared = prepare(place.options())
    assert prepared.is_complete
    assert asyncio.run(finish_batch(prepared)) == ExitCode.OK
    assert place.output.read_bytes() == before


def test_bad_lines_do_not_stop_the_others(place: Place) -> None:
    place.put(
        request(1),
        b"{not json",
        b"",
        request(4, custom_id="id-1"),
        {"method": "POST", "url": "/v1/x", "body": {}},
        request(6),
        request(7, body=[]),
    )
    assert place.run(Engine()) == ExitCode.LINES_FAILED
    lines = place.by_id()
    assert {name for name, line in lines.items() if line["error"] is None} == {"id-1", "id-6"}
    assert lines["line-2"]["error"].startswith("line 2: not JSON: ")
    assert lines["line-4"]["error"] == "line 4: custom_id 'id-1' was used before, on line 1"
    assert lines["line-5"]["error"] == "line 5: custom_id is missing"
    assert lines["id-7"]["error"] == "line 7: body must be a JSON object, not a list"
    engine = Engine()
    assert place.run(engine) == ExitCode.LINES_FAILED
    assert engine.asked == []


def test_errors_of_the_engine_are_lines_too(place: Place) -> None:
    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number == 2:
            raise RuntimeError("boom")
        if line.number == 3:
            return error_output(line.custom_id, {"error": {"message": "too long", "code": 400}})
        if line.number == 4:
            return {**good_output(line), "extra": object()}
        return good_output(line)

    place.put_many(5)
    assert place.run(Engine(reply)) == ExitCode.LINES_FAILED
    lines = place.by_id()
    assert lines["id-2"]["error"]["error"]["message"] == "line 2: RuntimeError: boom"
    assert lines["id-2"]["response"]["status_code"] == 500
    assert lines["id-3"]["error"]["error"]["message"] == "line 3: too long"
    assert "line 4: PydanticSerializationError" in lines["id-4"]["error"]["error"]["message"]
    assert lines["id-5"]["error"] is None


def test_failed_lines_are_asked_again_on_demand(place: Place) -> None:
    place.put_many(6)

    async def reply(line: BatchLine) -> dict[str, Any]:
        return error_output(line.custom_id, "busy", 503) if line.number in (2, 5) else good_output(line)

    assert place.run(Engine(reply)) == ExitCode.LINES_FAILED
    engine = Engine()
    assert place.run(engine, retry_failed=True) == ExitCode.OK
    assert sorted(engine.asked) == [2, 5]
    assert len(place.by_id()) == 6


@pytest.mark.parametrize("after", [1, 5, 19])
def test_a_dead_engine_ends_the_run_and_a_rerun_goes_on(place: Place, after: int) -> None:
    place.put_many(20)

    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number > after:
            raise PeerLost("rank 3 on host b is gone")
        return good_output(line)

    with pytest.raises(PeerLost, match="rank 3"):
        place.run(Engine(reply), max_in_flight=1)
    assert len(place.lines()) == after
    engine = Engine()
    assert place.run(engine) == ExitCode.OK
    assert sorted(engine.asked) == list(range(after + 1, 21))
    assert len(place.by_id()) == 20


def test_max_errors_stops_early(place: Place) -> None:
    place.put_many(1000)

    async def reply(line: BatchLine) -> dict[str, Any]:
        return error_output(line.custom_id, "no")

    assert place.run(Engine(reply), max_errors=4, max_in_flight=2) == ExitCode.STOPPED
    assert 5 <= len(place.lines()) <= 12
    assert "--max-errors is 4" in place.said[-1] and "of 1,000 lines are done" in place.said[-1]
    with pytest.raises(UsageError, match=r"\d+ lines in .* have failed, --max-errors is 4: raise it"):
        place.run(Engine(), max_errors=4)
    assert place.run(Engine(), max_errors=10) == ExitCode.LINES_FAILED
    assert len(place.by_id()) == 1000


def test_max_errors_that_are_not_exceeded(place: Place) -> None:
    place.put(b"{", *(request(number) for number in range(5)))
    assert place.run(Engine(), max_errors=1) == ExitCode.LINES_FAILED
    assert len(place.lines()) == 6


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_is_in_flight_finish(
    place: Place, number: signal.Signals, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    place.put_many(100)
    signalled = asyncio.Event()

    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number == 10:
            os.kill(os.getpid(), number)
            signalled.set()
        await signalled.wait()
        await asyncio.sleep(0.5)  # the run hears of it meanwhile
        return good_output(line)

    engine = Engine(reply)
    prepared = prepare(place.options(max_in_flight=10), say=place.said.append)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        code = runner.run(run_batch(engine, prepared.options, prepared=prepared, say=place.said.append))
    assert code == ExitCode.STOPPED
    assert len(place.lines()) == len(engine.asked) == 10
    assert place.said[-1] == (
        f"stopped by {number.name}; 10 of 100 lines are done: run the same command again to go on"
    )
    assert place.run(Engine()) == ExitCode.OK
    assert len(place.by_id()) == 100


@pytest.mark.parametrize("signals", [1, 2])
def test_what_does_not_finish_in_time_is_dropped(
    place: Place, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    monkeypatch.setattr(loop, "Echo", partial(Echo, 0.0))
    place.put_many(10)
    cancelled = []

    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number <= 3:
            return good_output(line)
        try:
            if line.number == 10:
                os.kill(os.getpid(), signal.SIGTERM)
                if signals == 2:
                    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            cancelled.append(line.number)
            raise
        raise AssertionError

    drain_s = 0.05 if signals == 1 else DEADLINE_S
    running = run_batch(Engine(reply), place.options(), drain_s=drain_s, say=place.said.append)
    assert asyncio.run(asyncio.wait_for(running, DEADLINE_S / 2)) == ExitCode.STOPPED
    assert sorted(cancelled) == list(range(4, 11))
    assert place.run(Engine()) == ExitCode.OK
    assert len(place.by_id()) == 10


def test_an_engine_that_goes_away_while_stopping_is_no_failure(place: Place) -> None:
    place.put_many(10)
    signalled = asyncio.Event()

    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number == 10:
            os.kill(os.getpid(), signal.SIGTERM)
            signalled.set()
        await signalled.wait()
        await asyncio.sleep(0.5)  # the run hears of it meanwhile
        raise PeerLost("the engine is gone")

    assert place.run(Engine(reply)) == ExitCode.STOPPED
    assert "stopped by SIGTERM; 0 of 10 lines are done" in place.said[-1]


def test_a_signal_is_heard_while_a_pipe_is_silent(place: Place) -> None:
    os.mkfifo(place.input)
    writer = os.open(place.input, os.O_RDWR)
    try:
        os.write(writer, json.dumps(request(1)).encode() + b"\n")

        async def reply(line: BatchLine) -> dict[str, Any]:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            return good_output(line)

        assert place.run(Engine(reply)) == ExitCode.STOPPED
    finally:
        os.close(writer)
    assert "stopped by SIGTERM; 1 lines are done" in place.said[-1]


def test_an_output_that_is_a_link(place: Place, tmp_path: Path) -> None:
    """What is locked, and replaced by the sorted one, is the file that the link leads to."""
    place.put_many(20)
    link = tmp_path / "link.jsonl"
    link.symlink_to(place.output)
    assert place.run(Engine(backwards), output_file=str(link), ordered=True) == ExitCode.OK
    assert link.is_symlink() and not place.output.is_symlink()
    assert [line["custom_id"] for line in place.lines()] == [f"id-{number}" for number in range(1, 21)]
    running = prepare(place.options(output_file=str(link)), say=place.said.append)
    with pytest.raises(UsageError, match="is being written by another run"):
        prepare(place.options(), say=place.said.append)
    running.close()


def test_ordered(place: Place) -> None:
    place.put_many(60)
    assert place.run(Engine(backwards)) == ExitCode.OK
    unsorted = [line["custom_id"] for line in place.lines()]
    assert place.run(Engine(), ordered=True) == ExitCode.OK
    assert (
        [line["custom_id"] for line in place.lines()]
        == [f"id-{number}" for number in range(1, 61)]
        != unsorted
    )


def test_changed_flags_and_inputs_are_refused(place: Place) -> None:
    place.put_many(5)
    assert place.run(Engine(), flags={"--model": "m"}) == ExitCode.OK
    with pytest.raises(UsageError, match="--model was m and is n"):
        place.run(Engine(), flags={"--model": "n"})
    place.put_many(6)
    with pytest.raises(UsageError, match="the input had 5 lines in"):
        place.run(Engine(), flags={"--model": "m"})
    assert place.run(Engine(), flags={"--model": "n"}, restart=True) == ExitCode.OK
    assert len(place.by_id()) == 6


def test_plain_prompts(place: Place) -> None:
    place.input.write_text("Hello\n\nWorld\n")
    more: dict[str, Any] = {
        "input_file": None,
        "prompts": str(place.input),
        "prompts_format": "text",
        "temperature": 0.0,
    }
    bodies = []

    async def reply(line: BatchLine) -> dict[str, Any]:
        bodies.append(dict(line.body))
        return good_output(line) if line.number == 1 else error_output(line.custom_id, "no")

    assert place.run(Engine(reply), **more) == ExitCode.LINES_FAILED
    assert bodies[0] == {"prompt": "Hello", "max_tokens": 256, "temperature": 0.0}
    lines = {line["line"]: line for line in place.lines()}
    assert lines[1]["text"] == "yes" and lines[1]["prompt"] == "Hello" and lines[1]["error"] is None
    assert lines[3]["text"] is None and lines[3]["error"] == "line 3: no"
    with pytest.raises(UsageError, match=r"--temperature was 0.0 and is 0.5"):
        place.run(Engine(), **{**more, "temperature": 0.5})


def test_prepare_refuses_and_leaves_nothing_behind(place: Place, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        prepare(place.options())
    assert os.listdir(tmp_path) == []
    place.put_many(1)
    with pytest.raises(UsageError, match=r"directory .* does not exist"):
        prepare(place.options(output_file=str(tmp_path / "none" / "out")))
    with pytest.raises(UsageError, match="is a directory"):
        prepare(place.options(output_file=str(tmp_path)))
    for url in ({"input_file": "http://127.0.0.1:1/in"}, {"output_file": "http://127.0.0.1:1/out"}):
        with pytest.raises(UsageError, match=r"--output-tmp-dir .*/none is no directory: make it first"):
            prepare(place.options(output_tmp_dir=str(tmp_path / "none"), **url))
    with pytest.raises(UsageError, match="would overwrite the input"):
        prepare(place.options(output_file=str(place.input)))
    assert os.listdir(tmp_path) == ["in.jsonl"]
