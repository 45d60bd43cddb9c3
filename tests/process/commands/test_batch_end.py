"""What all ranks of a batch end with, and when: torchrun's agents must not wait for each other.

Real torchrun, ranks, watchers and files; the engine is a fake (tests/support/fake_batch.py).
"""

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from harness.ports import free_port
from harness.server import Server
from harness.torchrun import Rendezvous, plain_environ, torchrun_command
from harness.waiting import Note, wait_until
from tests.support.batch import Place, request
from tests.support.faults import rank_processes
from tests.support.job import ROOT
from tests.support.web import web_server

DEADLINE_S = 60.0
TOGETHER_S = 60.0
"""From the first rank's end to the last agent's; its exit barrier takes 300 s."""
FAILS = {"fails": True}


class Run:
    """A batch of one agent or several, one rank each, with all that they print."""

    def __init__(
        self, place: Place, folder: Path, *flags: str, agents: int = 1, max_restarts: int = 0
    ) -> None:
        meeting = Rendezvous(f"127.0.0.1:{free_port()}", nnodes=str(agents)) if agents > 1 else None
        words = ["the-model", f"-o={place.output}", "--join-timeout=30", *flags]
        if not any(word.startswith("-i=") for word in flags):
            words.append(f"-i={place.input}")
        command = torchrun_command(
            1, words, rendezvous=meeting, max_restarts=max_restarts, module="tests.support.fake_batch"
        )
        environ = plain_environ(PYTHONPATH=str(ROOT))
        self.agents = [
            Server(command, folder / f"agent{number}", environ=environ) for number in range(agents)
        ]

    @contextmanager
    def started(self) -> Iterator["Run"]:
        with ExitStack() as stack:
            for agent in self.agents:
                stack.enter_context(agent)
            yield self

    def to_its_end(self) -> list[int]:
        """The agents' exit codes."""
        with self.started():
            return self.ended()

    def ended(self) -> list[int]:
        wait_until(lambda: self.codes() or self.any_ended(), DEADLINE_S, "a rank's end")
        first = time.monotonic()
        codes = [agent.wait_exit(TOGETHER_S) for agent in self.agents]
        self.apart_s = time.monotonic() - first
        return codes

    def any_ended(self) -> bool:
        return any(agent.returncode is not None for agent in self.agents)

    def codes(self) -> dict[int, int]:
        """Return the exit code of each torchrun rank in its last round."""
        found = re.findall(r"^rank (\d+) ends with (\d+)$", self.text(), re.MULTILINE)
        return {int(rank): int(code) for rank, code in found}

    def text(self) -> str:
        return "\n".join(agent.text() for agent in self.agents)


def put(place: Place, count: int, overrides: Mapping[int, Mapping[str, Any]]) -> None:
    """Write request lines 1 to `count`; `overrides` maps line numbers to further values of the body."""
    place.put(
        *(
            request(number, body={"value": number, **overrides.get(number, {})})
            for number in range(1, count + 1)
        )
    )


def written(place: Place) -> int:
    return place.output.read_bytes().count(b"\n") if place.output.exists() else 0


def test_failed_lines_end_all_ranks_of_all_agents_with_3(tmp_path: Path, note: Note) -> None:
    """The same holds for a rerun without any request left."""
    place = Place(tmp_path)
    put(place, 20, {7: FAILS})
    for folder in ("first", "rerun"):
        run = Run(place, tmp_path / folder, agents=2)
        assert run.to_its_end() == [1, 1], run.text()  # torchrun's
        note(f"{folder}: both agents ended within {run.apart_s:.1f} s")
        assert run.codes() == {0: 3, 1: 3}, run.text()
        for agent in run.agents:
            cause = agent.text().rpartition("Root Cause (first observed failure)")[2]
            assert "all lines are in" in cause and re.search("exitcode *: 3 ", cause), agent.text()
    assert written(place) == 20


def test_failed_lines_do_not_restart_any_agent(tmp_path: Path) -> None:
    place = Place(tmp_path)
    put(place, 20, {7: FAILS})
    run = Run(place, tmp_path, agents=2, max_restarts=1)
    assert run.to_its_end() == [0, 0], run.text()
    assert run.codes() == {0: 0, 1: 0}
    assert "torchrun would start the finished run again" in run.text()
    assert run.text().count("ends with") == 2, "one round"


SLOW = {number: {"seconds": 0.2} for number in range(1, 401)}
"""Line numbers and seconds: more than a minute, one at a time."""


def test_a_stop_ends_all_ranks_of_all_agents_with_4_and_a_rerun_continues(tmp_path: Path, note: Note) -> None:
    place = Place(tmp_path)
    put(place, 400, SLOW)
    run = Run(place, tmp_path, "--max-in-flight=1", agents=2)
    with run.started():
        wait_until(lambda: written(place) >= 3, DEADLINE_S, "three lines")
        rank = rank_processes(run.agents[1].pid)
        os.kill(next(iter(rank.values())).pid, signal.SIGTERM)
        assert run.ended() == [1, 1], run.text()
    note(f"both agents ended within {run.apart_s:.1f} s")
    assert run.codes() == {0: 4, 1: 4}, run.text()
    before = place.output.read_bytes()
    assert 3 <= written(place) < 400
    done = Run(place, tmp_path, "--max-in-flight=400", agents=2)
    assert done.to_its_end() == [0, 0], done.text()
    assert place.output.read_bytes().startswith(before) and len(place.by_id()) == 400


def test_a_stopped_batch_continues_in_the_round_that_torchrun_starts(tmp_path: Path) -> None:
    """After a signal to a rank, with restarts left, all agents take part in the next round."""
    place = Place(tmp_path)
    put(place, 60, {number: {"seconds": 0.1} for number in range(1, 61)})
    run = Run(place, tmp_path, "--max-in-flight=1", agents=2, max_restarts=1)
    with run.started():
        wait_until(lambda: written(place) >= 3, DEADLINE_S, "three lines")
        os.kill(rank_processes(run.agents[0].pid).popitem()[1].pid, signal.SIGTERM)
        wait_until(lambda: run.codes() == {0: 4, 1: 4}, DEADLINE_S, "the first round's end")
        before = place.output.read_bytes()
        wait_until(partial(wait_for_all, run, place), DEADLINE_S, "the second round")
        assert [agent.wait_exit(TOGETHER_S) for agent in run.agents] == [0, 0], run.text()
    assert run.codes() == {0: 0, 1: 0}
    assert place.output.read_bytes().startswith(before) and len(place.by_id()) == 60


def wait_for_all(run: Run, place: Place) -> bool:
    return written(place) == 60 or run.any_ended()


@pytest.mark.parametrize(("overrides", "code"), [({}, 0), ({3: FAILS}, 3)])
def test_a_signal_while_the_engine_ends_changes_nothing(
    overrides: dict[int, dict[str, Any]], code: int, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    put(place, 10, overrides)
    run = Run(place, tmp_path, "--signalled-end")
    assert run.to_its_end() == [min(code, 1)], run.text()
    assert run.codes() == {0: code}, run.text()
    assert written(place) == 10 and "the job has failed" not in run.text()


class Quiet(SimpleHTTPRequestHandler):
    """The files of a folder."""

    def log_message(self, *_: object) -> None:
        pass


def test_max_errors_stops_a_run_that_reads_from_a_web_server(tmp_path: Path) -> None:
    place = Place(tmp_path)
    put(place, 100, dict.fromkeys((2, 4, 6, 8, 90), FAILS))
    with web_server(partial(Quiet, directory=str(tmp_path))) as address:
        source = f"-i={address}/{place.input.name}"
        run = Run(place, tmp_path, source, "--max-errors=2", "--max-in-flight=1")
        assert run.to_its_end() == [1]
        assert run.codes() == {0: 4}, run.text()
        assert "stopped: 3 lines failed, --max-errors is 2; " in run.text()
        assert 6 <= written(place) < 90
        refused = Run(place, tmp_path / "refused", source, "--max-errors=2")
        assert refused.to_its_end() == [1]
        assert refused.codes() == {0: 2} and "have failed, --max-errors is 2: raise it" in refused.text()
        more = Run(place, tmp_path / "more", source, "--max-errors=5")
        assert more.to_its_end() == [1]
        assert more.codes() == {0: 3}, more.text()
    failed = [name for name, line in place.by_id().items() if line["error"] is not None]
    assert len(place.by_id()) == 100 and sorted(failed) == ["id-2", "id-4", "id-6", "id-8", "id-90"]
