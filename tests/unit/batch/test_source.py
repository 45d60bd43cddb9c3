"""Inputs: files, URLs and pipes, read as a stream of numbered lines."""

import asyncio
import gzip
import hashlib
import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import uvloop

from spmd_serve.batch import source as module
from spmd_serve.batch.source import InputFingerprint, InputSource
from spmd_serve.errors import UsageError
from tests.support.web import web_server

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def read(source: InputSource, new_loop: NewLoop = asyncio.new_event_loop) -> list[tuple[int, bytes]]:
    async def collect() -> list[tuple[int, bytes]]:
        return [item async for item in source.lines()]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(asyncio.wait_for(collect(), 20))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 18])
@LOOPS
def test_lines_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, new_loop: NewLoop
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    content = b"\xef\xbb\xbfone\r\n\n  \ntwo two\n\nlast"
    (tmp_path / "in").write_bytes(content)
    source = InputSource.open(str(tmp_path / "in"))
    assert source.identify() == InputFingerprint(len(content), hashlib.sha256(content).hexdigest(), 3)
    lines = read(source, new_loop)
    assert [(number, line.strip()) for number, line in lines] == [(1, b"one"), (4, b"two two"), (6, b"last")]
    assert read(source) == lines
    source.close()
    source.close()


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n \n"])
def test_empty_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").write_bytes(content)
    source = InputSource.open(str(tmp_path / "in"))
    fingerprint = source.identify()
    assert fingerprint is not None and (fingerprint.size, fingerprint.lines) == (len(content), 0)
    assert read(source) == []
    source.close()


@LOOPS
def test_a_pipe_does_not_hold_up_the_loop(tmp_path: Path, new_loop: NewLoop) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    source = InputSource.open(str(tmp_path / "pipe"))
    assert source.is_pipe and source.identify() is None

    async def talk() -> list[tuple[int, bytes]]:
        nonlocal writer
        lines = source.lines()
        os.write(writer, b"one\ntw")
        got = [await anext(lines)]
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        assert not waiting.done()
        os.write(writer, b"o\nthree")
        got.append(await waiting)
        os.close(writer)
        writer = -1
        return [*got, *[item async for item in lines]]

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            got = runner.run(asyncio.wait_for(talk(), 20))
    finally:
        if writer >= 0:
            os.close(writer)
    assert got == [(1, b"one"), (2, b"two"), (3, b"three")]
    source.close()


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        InputSource.open(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="is a directory"):
        InputSource.open(str(tmp_path))


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path in ("/in.jsonl", "/in.gz")
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", "9" if self.path != "/in.gz" else str(len(PACKED)))
        self.end_headers()
        self.wfile.write(b"one\ntwo\n\n" if self.path != "/in.gz" else PACKED)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_url(tmp_path: Path) -> None:
    with web_server(_Handler) as address:
        source = InputSource.open(f"{address}/in.jsonl", str(tmp_path))
        assert os.listdir(tmp_path) == []
        fingerprint = source.identify()
        assert fingerprint is not None and fingerprint.lines == 2
        assert read(source) == [(1, b"one"), (2, b"two")]
        source.close()
        packed = InputSource.open(f"{address}/in.gz")
        assert [line.strip() for _, line in read(packed)] == [b"one", b"two"]
        packed.close()
        with pytest.raises(UsageError, match=r"cannot be fetched: HTTP Error 404"):
            InputSource.open(f"{address}/none")
    with pytest.raises(UsageError, match=r"cannot be fetched: .*refused"):
        InputSource.open(f"{address}/in.jsonl")


PACKED = gzip.compress(b"\xef\xbb\xbfone\n") + gzip.compress(b"\ntwo")  # as `cat a.gz b.gz` makes it


@pytest.mark.parametrize("chunk", [1, 1 << 18])
def test_gzip_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    (tmp_path / "in").write_bytes(PACKED)
    (tmp_path / "plain").write_bytes(gzip.decompress(PACKED))
    source, plain = (InputSource.open(str(tmp_path / name)) for name in ("in", "plain"))
    assert source.identify() == plain.identify(), "a rerun may give either"
    lines = read(source)
    assert [(number, line.strip()) for number, line in lines] == [(1, b"one"), (3, b"two")]
    assert read(source) == lines
    source.close()
    plain.close()


@pytest.mark.parametrize(
    "content",
    [PACKED[:-9], PACKED[:2], PACKED[:30] + b"\xff\xff" + PACKED[32:], PACKED + b"x" * 9],
    ids=["truncated", "two bytes", "damaged", "trailing bytes"],
)
def test_damaged_gzip_is_refused_before_the_model_loads(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").write_bytes(content)
    source = InputSource.open(str(tmp_path / "in"))
    with pytest.raises(UsageError, match=r"the input .*/in (cannot be read|is a damaged gzip file): \S"):
        source.identify()
    source.close()


def test_gzip_in_a_pipe_is_refused() -> None:
    reader, writer = os.pipe()
    os.write(writer, PACKED)
    os.close(writer)
    source = InputSource("standard input", reader, is_pipe=True)
    with pytest.raises(UsageError, match="standard input is gzip: pipe it through `gzip -dc`"):
        read(source)
    source.close()
