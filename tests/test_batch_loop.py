"""The run with a fake engine: every line answered once, whatever is wrong with it, and however often it is begun."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvloop

from spmd_serve.batch import Answer, BatchLine, BatchOptions, Launch, outputs, prepare, run_batch
from spmd_serve.batch.lines import error_output
from spmd_serve.errors import ExitCode, PeerLost, SpmdError, UsageError

DEADLINE_S = 30


def request(number: int, **more: Any) -> dict[str, Any]:
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/x", "body": {"value": number}, **more}


def good_output(line: BatchLine) -> dict[str, Any]:
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    body = {"echo": dict(line.body), "usage": usage, "choices": [{"index": 0, "text": "yes"}]}
    response = {"status_code": 200, "request_id": f"r-{line.custom_id}", "body": body}
    return {"id": f"v-{line.custom_id}", "custom_id": line.custom_id, "response": response, "error": None}


class Engine:
    """Counts who was asked, and how many at a time."""

    def __init__(self, reply: Callable[[BatchLine], Awaitable[dict[str, Any]]] | None = None) -> None:
        self.asked: list[int] = []
        self.now = self.most = 0
        self._reply = reply

    async def __call__(self, line: BatchLine) -> dict[str, Any]:
        self.asked.append(line.number)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            return good_output(line) if self._reply is None else await self._reply(line)
        finally:
            self.now -= 1


class Place:
    """An input and an output in a folder."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.said: list[str] = []

    def put(self, *lines: bytes | Mapping[str, Any]) -> None:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"\n".join(raw) + b"\n")

    def put_many(self, count: int) -> None:
        self.put(*(request(number) for number in range(1, count + 1)))

    def options(self, **more: Any) -> BatchOptions:
        return BatchOptions(**{"input_file": str(self.input), "output_file": str(self.output), **more})

    def run(
        self, answer: Answer, *, flags: Mapping[str, str] | None = None, launch: Launch | None = None, **more: Any
    ) -> ExitCode:
        prepared = prepare(self.options(**more), flags, launch or Launch(), self.said.append)
        running = run_batch(answer, prepared.options, prepared=prepared, say=self.said.append)
        return asyncio.run(asyncio.wait_for(running, DEADLINE_S))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def by_id(self) -> dict[str, dict[str, Any]]:
        lines = self.lines()
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found


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
    assert place.said[-1].startswith(
        f"{place.output}: 100 lines: 100 answered, 0 failed; "
    ) and "200 tokens in" in (place.said[-1])


def test_nothing_is_done_twice(place: Place) -> None:
    place.put_many(20)
    assert place.run(Engine()) == ExitCode.OK
    before = place.output.read_bytes()
    again = Engine()
    prepared = prepare(place.options())
    assert prepared.is_complete
    prepared.close()
    assert place.run(again) == ExitCode.OK
    assert again.asked == [] and place.output.read_bytes() == before


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

    assert place.run(Engine(reply), max_errors=4, max_in_flight=2) == ExitCode.FAILED
    assert 5 <= len(place.lines()) <= 12
    assert "--max-errors is 4" in place.said[-1] and "of 1,000 lines are done" in place.said[-1]
    assert place.run(Engine(), max_errors=4) == ExitCode.FAILED, "earlier failures count"
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

    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number == 10:
            os.kill(os.getpid(), number)
        await asyncio.sleep(0.02)
        return good_output(line)

    engine = Engine(reply)
    prepared = prepare(place.options(max_in_flight=10), say=place.said.append)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        code = runner.run(run_batch(engine, prepared.options, prepared=prepared, say=place.said.append))
    assert code == ExitCode.FAILED
    assert len(place.lines()) == len(engine.asked) == 10
    assert place.said[-1] == (
        f"stopped by {number.name}; 10 of 100 lines are done: run the same command again to go on"
    )
    assert place.run(Engine()) == ExitCode.OK
    assert len(place.by_id()) == 100


@pytest.mark.parametrize("signals", [1, 2])
def test_what_does_not_finish_in_time_is_dropped(place: Place, signals: int) -> None:
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
    assert asyncio.run(asyncio.wait_for(running, DEADLINE_S / 2)) == ExitCode.FAILED
    assert sorted(cancelled) == list(range(4, 11))
    assert place.run(Engine()) == ExitCode.OK
    assert len(place.by_id()) == 10


def test_an_engine_that_goes_away_while_stopping_is_no_failure(place: Place) -> None:
    place.put_many(10)

    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.02)
        raise PeerLost("the engine is gone")

    assert place.run(Engine(reply)) == ExitCode.FAILED
    assert "stopped by SIGTERM; 0 of 10 lines are done" in place.said[-1]


def test_a_signal_is_heard_while_a_pipe_is_silent(place: Place) -> None:
    os.mkfifo(place.input)
    writer = os.open(place.input, os.O_RDWR)
    try:
        os.write(writer, json.dumps(request(1)).encode() + b"\n")

        async def reply(line: BatchLine) -> dict[str, Any]:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            return good_output(line)

        assert place.run(Engine(reply)) == ExitCode.FAILED
    finally:
        os.close(writer)
    assert "stopped by SIGTERM; 1 lines are done" in place.said[-1]


async def backwards(line: BatchLine) -> dict[str, Any]:
    for _ in range(10 - line.number % 10):
        await asyncio.sleep(0.001)
    return good_output(line)


def test_ordered(place: Place) -> None:
    place.put_many(60)
    assert place.run(Engine(backwards)) == ExitCode.OK
    unsorted = [line["custom_id"] for line in place.lines()]
    assert place.run(Engine(), ordered=True) == ExitCode.OK
    assert [line["custom_id"] for line in place.lines()] == [f"id-{number}" for number in range(1, 61)] != unsorted


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


def pipe(folder: Path, *lines: Mapping[str, Any]) -> threading.Thread:
    """Write lines into the named pipe `in.jsonl`, as another process would."""

    def write() -> None:
        with (folder / "in.jsonl").open("w") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_pipe_is_resumed_if_it_brings_the_same_lines(place: Place, tmp_path: Path) -> None:
    os.mkfifo(place.input)

    async def reply(line: BatchLine) -> dict[str, Any]:
        if line.number > 3:
            raise SpmdError("crash")
        return good_output(line)

    def run(answer: Answer, *lines: Mapping[str, Any]) -> ExitCode:
        writer = pipe(tmp_path, *lines)
        try:
            return place.run(answer, max_in_flight=1)
        finally:
            writer.join(DEADLINE_S)

    with pytest.raises(SpmdError, match="crash"):
        run(Engine(reply), *map(request, range(1, 7)))
    assert len(place.lines()) == 3
    with pytest.raises(UsageError, match=r"line 2 of .* is not what was answered as line 2 before"):
        run(Engine(), request(1), request(9), request(3))
    with pytest.raises(UsageError, match=r"ended at line 2, but line 3 was answered before"):
        run(Engine(), request(1), request(2))
    engine = Engine()
    assert run(engine, *map(request, range(1, 7))) == ExitCode.OK
    assert engine.asked == [4, 5, 6]
    assert len(place.by_id()) == 6


def test_torchrun_cannot_restart_what_read_a_pipe(place: Place, tmp_path: Path) -> None:
    os.mkfifo(place.input)
    writer = pipe(tmp_path, request(1))
    assert place.run(Engine(), launch=Launch("job")) == ExitCode.OK
    writer.join(DEADLINE_S)
    keep_open = os.open(place.input, os.O_RDWR)
    try:
        with pytest.raises(UsageError, match="torchrun has restarted a run that was reading"):
            place.run(Engine(), launch=Launch("job", restarted=True))
    finally:
        os.close(keep_open)


def test_torchrun_cannot_restart_what_wrote_a_pipe(place: Place) -> None:
    place.put_many(1)
    with pytest.raises(UsageError, match="torchrun has restarted a run whose answers went to -"):
        prepare(place.options(output_file="-"), launch=Launch("job", restarted=True))


def test_plain_prompts(place: Place) -> None:
    place.input.write_text("Hello\n\nWorld\n")
    more = {"input_file": None, "prompts": str(place.input), "prompts_format": "text", "temperature": 0.0}
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
    with pytest.raises(UsageError, match="would overwrite the input"):
        prepare(place.options(output_file=str(place.input)))
    assert os.listdir(tmp_path) == ["in.jsonl"]


class _Bucket(BaseHTTPRequestHandler):
    refuse = 1
    got: bytes = b""

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if type(self).refuse:
            type(self).refuse -= 1
            self.send_response(503)
        else:
            type(self).got = content
            self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_output_url(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put_many(5)
    monkeypatch.setattr(outputs, "UPLOAD_RETRY_S", 0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Bucket) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/dir/out.jsonl?signature=x"
            more = {"output_file": url, "output_tmp_dir": str(tmp_path), "ordered": True}
            assert place.run(Engine(), **more) == ExitCode.OK
            assert [json.loads(line)["custom_id"] for line in _Bucket.got.splitlines()] == [
                f"id-{number}" for number in range(1, 6)
            ]
            (local,) = tmp_path.glob("*-out.jsonl")
            assert local.read_bytes() == _Bucket.got
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)
    monkeypatch.setattr(outputs, "UPLOAD_TRIES", 2)
    with pytest.raises(SpmdError, match=f"takes no upload: .*; the answers are in {local}"):
        place.run(Engine(), **more)


PROGRAM = """
import asyncio, sys
from spmd_serve.batch import BatchOptions, run_batch
from tests.test_batch_loop import backwards
from spmd_serve.errors import SpmdError
options = BatchOptions(input_file="-", output_file="-", ordered=sys.argv[1] == "ordered", max_in_flight=8)
async def answer(line):
    print("noise on standard output")
    return await backwards(line)
try:
    sys.exit(asyncio.run(run_batch(answer, options)))
except SpmdError as problem:
    sys.exit(f"error: {problem}")
"""


@pytest.mark.parametrize("order", ["ordered", "as finished"])
def test_pipes(order: str) -> None:
    content = "".join(json.dumps(request(number)) + "\n" for number in range(1, 301))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, order], input=content.encode(), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    ids = [json.loads(line)["custom_id"] for line in done.stdout.splitlines()]
    expected = [f"id-{number}" for number in range(1, 301)]
    assert sorted(ids, key=lambda name: int(name[3:])) == expected
    assert (ids == expected) == (order == "ordered")
    assert done.stderr.count(b"noise") == 300


def test_a_pipe_whose_reader_is_gone() -> None:
    content = "".join(json.dumps(request(number)) + "\n" for number in range(1, 3001))
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "ordered"], stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE
    ) as process:
        try:
            os.close(writer)
            os.close(reader)
            _, errors = process.communicate(content.encode(), timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert b"error: whoever read standard output is gone" in errors
