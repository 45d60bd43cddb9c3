"""kill -9 of a real process at random moments, SIGTERM, and a full disk: the final file is that of a quiet
run.

As a program (``python -m tests.process.batch.test_kill IN OUT ASKED``) it is the process that gets killed: a
batch
with a fake engine, which notes in ASKED which lines it was asked.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import wait_until
from spmd_serve.batch import BatchLine, BatchOptions, run_batch
from spmd_serve.batch.journal import Journal
from spmd_serve.errors import ExitCode, SpmdError

LINES = 3000
KILLS = 20
WINDOW = 16
DEADLINE_S = 30.0


def write_input(path: Path, lines: int = LINES) -> None:
    with path.open("w") as stream:
        for number in range(1, lines + 1):
            body = {"value": number, "text": "ä" * (number % 200)}
            row = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/x", "body": body}
            stream.write(json.dumps(row) + "\n")


async def _answer(line: BatchLine, asked: int, longest_s: float) -> dict[str, Any]:
    os.write(asked, b"%d\n" % line.number)
    await asyncio.sleep(random.random() * longest_s)
    response = {"status_code": 200, "request_id": f"r-{line.custom_id}", "body": dict(line.body)}
    return {"id": f"v-{line.custom_id}", "custom_id": line.custom_id, "response": response, "error": None}


def main(source: str, out: str, asked_file: str, *more: str) -> int:
    asked = os.open(asked_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    options = BatchOptions(
        input_file=source,
        output_file=out,
        max_in_flight=WINDOW,
        ordered="ordered" in more,
        restart="anew" in more,
    )
    if "small" in more:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    longest_s = 0.5 if "slow" in more else 0.05  # slow: who signals it may be seconds late
    try:
        return asyncio.run(run_batch(lambda line: _answer(line, asked, longest_s), options, drain_s=30))
    except SpmdError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code


class Bench:
    """Runs the program in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input, self.out, self.asked_file = folder / "in.jsonl", folder / "out.jsonl", folder / "asked"
        self.state = folder / "out.jsonl.state"

    def command(self, *more: str) -> list[str]:
        paths = (self.input, self.out, self.asked_file)
        return [sys.executable, "-m", "tests.process.batch.test_kill", *map(str, paths), *more]

    def run(self, *more: str) -> tuple[int, str]:
        """Exit code and what was said."""
        root = Path(__file__).parents[3]
        done = subprocess.run(
            self.command(*more), cwd=root, capture_output=True, text=True, timeout=90, check=False
        )
        return done.returncode, done.stderr

    @contextlib.contextmanager
    def started(self, *more: str) -> Iterator[subprocess.Popen[str]]:
        root = Path(__file__).parents[3]
        with subprocess.Popen(self.command(*more), cwd=root, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def asked(self) -> list[int]:
        return [int(line) for line in self.asked_file.read_text().split()] if self.asked_file.exists() else []

    def wait_for_asked(self, count: int) -> None:
        wait_until(lambda: len(self.asked()) >= count, DEADLINE_S, f"{count} lines to be asked")

    def recorded(self) -> set[int]:
        """The lines that a rerun will find done."""
        return {
            json.loads(line)["response"]["body"]["value"] for line in self.out.read_bytes().splitlines()[:-1]
        }

    def lines(self) -> list[bytes]:
        return self.out.read_bytes().splitlines(True)


@pytest.fixture(scope="module")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The output of a run that nothing disturbed, sorted."""
    bench = Bench(tmp_path_factory.mktemp("quiet"))
    write_input(bench.input)
    code, said = bench.run()
    assert code == ExitCode.OK, said
    lines = sorted(bench.lines())
    assert len(lines) == LINES
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
def test_killed_again_and_again(tmp_path: Path, quiet_run: list[bytes], ordered: bool) -> None:
    bench = Bench(tmp_path)
    write_input(bench.input)
    more = ("ordered",) if ordered else ()
    chance = random.Random(4 + ordered)
    kills, code = 0, -signal.SIGKILL
    # Where we are starved, it may have answered all lines meanwhile: then nothing is left to kill.
    while kills < KILLS and code == -signal.SIGKILL:
        before = len(bench.asked())
        done_before = bench.recorded() if bench.out.exists() else set()
        asked_until = before + chance.randint(1, 30)
        with bench.started(*more) as process:
            wait_until(
                lambda: len(bench.asked()) >= asked_until or process.poll() is not None,  # noqa: B023
                DEADLINE_S,
                f"{asked_until} lines to be asked",
            )
            # A moment of no particular length: reading the pipe of a process that says nothing.
            assert process.stderr is not None
            select.select([process.stderr], [], [], chance.random() / 20)
            process.send_signal(signal.SIGKILL)
            code = process.wait(DEADLINE_S)
            assert code in (-signal.SIGKILL, ExitCode.OK), process.stderr.read()
        kills += code == -signal.SIGKILL
        again = set(bench.asked()[before:]) & done_before
        assert not again, f"asked although they were done: {again}"
    assert kills > 0
    code, said = bench.run(*more)
    assert code == ExitCode.OK, said
    assert sorted(bench.lines()) == quiet_run
    values = [json.loads(line)["response"]["body"]["value"] for line in bench.lines()]
    assert (values == sorted(values)) is ordered
    assert len(bench.asked()) <= LINES + KILLS * 2 * WINDOW
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "out.jsonl.state", "asked"}


def test_sigterm_stops_and_a_rerun_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    write_input(bench.input, 400)
    with bench.started("slow") as process:
        bench.wait_for_asked(50)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.STOPPED
    assert "stopped by SIGTERM; " in said and "run the same command again to go on" in said
    assert len(bench.lines()) == len(bench.asked()), "what was in flight got the time to finish"
    code, said = bench.run()
    assert code == ExitCode.OK, said
    assert sorted(bench.asked()) == list(range(1, 401))
    assert len(set(bench.lines())) == 400


def test_a_second_run_is_refused_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    write_input(bench.input)
    with bench.started("slow") as process:
        bench.wait_for_asked(1)
        code, said = bench.run("anew")
        assert code == ExitCode.USAGE
        assert f"out.jsonl is being written by another run (process {process.pid} on " in said
        assert process.poll() is None


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    write_input(bench.input, 400)
    code, said = bench.run("small")
    assert code == ExitCode.FAILED
    kept = len(bench.lines())
    assert f"cannot be written: File too large; {kept} answers are kept in it" in said
    assert bench.out.read_bytes().endswith(b"\n")
    code, said = bench.run()
    assert code == ExitCode.OK, said
    assert len(set(bench.lines())) == 400
    assert len(bench.asked()) <= 400 + 2 * WINDOW


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 96 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_full_disk(tmp_path: Path, small_disk: Path, ordered: bool) -> None:
    bench = Bench(tmp_path)
    bench.out = small_disk / "out.jsonl"
    write_input(bench.input, 280 if ordered else 600)
    more = ("ordered",) if ordered else ()
    code, said = bench.run(*more)
    assert code == ExitCode.FAILED, said
    kept = len(bench.lines())
    assert f"cannot be written: No space left on device; {kept} answers are kept in it" in said
    assert (kept == 280) is ordered, "sorting needs room for a second copy; the answers need none"
    assert sorted(path.name for path in small_disk.iterdir()) == ["out.jsonl", "out.jsonl.state"]
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    code, said = bench.run(*more)
    assert code == ExitCode.OK, said
    values = [json.loads(line)["response"]["body"]["value"] for line in bench.lines()]
    assert sorted(values) == list(range(1, len(values) + 1))
    assert (values == sorted(values)) is ordered
    Journal(str(bench.out), print).close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
