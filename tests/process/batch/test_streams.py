"""Pipes and web servers as input and output, and what of them can be resumed."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spmd_serve.batch import Answer, BatchLine, Launch, outputs, prepare
from spmd_serve.errors import ExitCode, SpmdError, UsageError
from tests.support.batch import DEADLINE_S, Engine, Place, good_output, request
from tests.support.web import web_server


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


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
            more: dict[str, Any] = {"output_file": url, "output_tmp_dir": str(tmp_path), "ordered": True}
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


class _Breaking(BaseHTTPRequestHandler):
    """Answer an upload with bytes that are not HTTP, or close the connection without an answer."""

    replies = (b"", b"no HTTP\r\n")
    tries = 0

    def do_PUT(self) -> None:
        self.wfile.write(self.replies[type(self).tries % 2])
        type(self).tries += 1
        self.close_connection = True


def test_an_upload_whose_connection_breaks_is_tried_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put_many(5)
    monkeypatch.setattr(outputs, "UPLOAD_RETRY_S", 0.01)
    error = pytest.raises(SpmdError, match=r"takes no upload: .*; the answers are in .*-out\.jsonl: run")
    with web_server(_Breaking) as address, error:
        place.run(Engine(), output_file=f"{address}/out.jsonl", output_tmp_dir=str(tmp_path))
    assert _Breaking.tries == outputs.UPLOAD_TRIES
    pauses = [line.rpartition(" in ")[2] for line in place.said if "upload to" in line]
    assert pauses == ["0.01 s", "0.02 s", "0.04 s", "0.08 s"]


PROGRAM = """
import asyncio, atexit, multiprocessing, sys
from spmd_serve.batch.outputs import take_stdout
from spmd_serve.batch import BatchOptions, prepare, run_batch
from tests.support.batch import backwards
from spmd_serve.errors import SpmdError
options = BatchOptions(input_file="-", output_file="-", ordered=sys.argv[1] == "ordered", max_in_flight=8)
async def answer(line):
    print("noise on standard output")
    return await backwards(line)
def run(prepared):
    try:
        sys.exit(asyncio.run(run_batch(answer, options, prepared=prepared)))
    except SpmdError as problem:
        sys.exit(f"error: {problem}")
if sys.argv[2] == "taken":
    take_stdout()
    print("noise of another part")
    atexit.register(print, "noise after the end")
prepared = prepare(options)
if sys.argv[2] == "forked":
    child = multiprocessing.get_context("fork").Process(target=run, args=(prepared,))
    child.start()
    child.join()
    sys.exit(child.exitcode)
run(prepared)
"""


@pytest.mark.parametrize("process", ["own", "forked", "taken"])
@pytest.mark.parametrize("order", ["ordered", "as finished"])
def test_pipes(order: str, process: str) -> None:
    """Also when a forked child runs what its parent has prepared, as rank 0 does."""
    content = "".join(json.dumps(request(number)) + "\n" for number in range(1, 301))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, order, process],
        input=content.encode(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ids = [json.loads(line)["custom_id"] for line in done.stdout.splitlines()]
    expected = [f"id-{number}" for number in range(1, 301)]
    assert sorted(ids, key=lambda name: int(name[3:])) == expected
    assert (ids == expected) == (order == "ordered")
    assert done.stderr.count(b"noise") == (302 if process == "taken" else 300)


def test_a_pipe_whose_reader_is_gone() -> None:
    content = "".join(json.dumps(request(number)) + "\n" for number in range(1, 3001))
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "ordered", "own"],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            os.close(writer)
            os.close(reader)
            _, errors = process.communicate(content.encode(), timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert b"error: whoever read standard output is gone" in errors
