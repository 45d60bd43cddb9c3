"""`spmd_serve batch` under torchrun: whatever is killed or stopped, nothing is lost or done twice."""

import json
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from harness.processes import Process, assert_gone, descendants, everybody
from harness.waiting import wait_until
from tests.support.batch_runs import DEADLINE_S, Bench, chat, comparable
from tests.support.faults import rank_processes

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

LINES = 2000
SOME = 700
"""More than are in flight at a time."""
FLAGS = ("-tp=2", "--max-num-seqs=32")
TINY = [chat(number, f"{number}", max_tokens=8, ignore_eos=True) for number in range(1, LINES + 1)]


def children(pid: int) -> list[Process]:
    """Those that do the work: not the watcher, not multiprocessing's tracker."""
    return [
        child
        for child in descendants(pid)
        if child.parent == pid
        and "resource_tracker" not in child.command
        and Path(f"/proc/{child.pid}/comm").read_text() != "spmd-watcher\n"
    ]


def batch_run(agent: int) -> Process:
    (child,) = children(rank_processes(agent)[0].pid)
    return child


def engine_core(agent: int) -> Process:
    (core,) = children(batch_run(agent).pid)
    return core


VICTIMS: dict[str, Callable[[int], Process]] = {
    "rank 0": lambda agent: rank_processes(agent)[0],
    "rank 1": lambda agent: rank_processes(agent)[1],
    "engine core": engine_core,
    "batch run": batch_run,
    "agent": lambda agent: next(process for process in everybody() if process.pid == agent),
}


@pytest.fixture(scope="module")
def undisturbed(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a run gives that nobody disturbs."""
    bench = Bench(tmp_path_factory.mktemp("quiet"), tiny_qwen3)
    bench.put(TINY)
    ended = bench.run(*FLAGS)
    assert ended.code == 0, ended.text
    return sorted_lines(bench)


def sorted_lines(bench: Bench) -> list[str]:
    return sorted(json.dumps(comparable(line)) for line in bench.lines())


# By hand: minutes of work, and half a minute for each start after a kill. In CI test_batch_kill.py kills the
# process that writes.
@pytest.mark.by_hand
@pytest.mark.parametrize("max_restarts", [10, 0])
def test_killed_at_five_moments(
    max_restarts: int, tiny_qwen3: Path, tmp_path: Path, undisturbed: list[str]
) -> None:
    chance = random.Random(max_restarts)
    bench = Bench(tmp_path, tiny_qwen3)
    bench.put(TINY)
    whom = list(VICTIMS)
    chance.shuffle(whom)
    moments = sorted(chance.sample(range(50, LINES - 200), len(whom)))
    done: set[bytes] = set()
    while whom:
        with bench.server(*FLAGS, max_restarts=max_restarts) as server:
            goes_on = True
            while whom and goes_on:
                victim, moment = whom.pop(), moments.pop(0)
                wait_until(partial(bench.has, moment), DEADLINE_S, f"line {moment}")
                family = descendants(server.pid)
                done |= set(bench.output.read_bytes().splitlines()[:-1])
                print(f"kill -9 of the {victim} at {len(done)} lines")
                VICTIMS[victim](server.pid).signal(signal.SIGKILL)
                assert_gone(family, 60)
                goes_on = max_restarts > 0 and victim != "agent"
            assert (server.wait_exit(DEADLINE_S) == 0) is goes_on, server.tail()
    ended = bench.run(*FLAGS, max_restarts=max_restarts)
    assert ended.code == 0, ended.text
    assert sorted_lines(bench) == undisturbed
    assert done <= set(bench.output.read_bytes().splitlines()), "what was finished is done again"


# By hand: two more starts.
@pytest.mark.by_hand
@pytest.mark.parametrize("to_a_rank", [False, True])
def test_sigterm_stops_it_and_the_same_command_goes_on(
    to_a_rank: bool, tiny_qwen3: Path, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, tiny_qwen3)
    bench.put(TINY[:SOME])
    with bench.server(*FLAGS) as server:
        wait_until(partial(bench.has, 20), DEADLINE_S, "20 lines")
        family = descendants(server.pid)
        os.kill(rank_processes(server.pid)[1].pid if to_a_rank else server.pid, signal.SIGTERM)
        assert server.wait_exit(40) != 0
        assert_gone(family, 5)
        assert "run the same command again to go on" in server.text()
        assert "the job has failed" not in server.text() and "error:" not in server.text(), server.tail()
    done = set(bench.output.read_bytes().splitlines())
    ended = bench.run(*FLAGS)
    assert ended.code == 0, ended.text
    assert len(bench.by_id()) == SOME
    assert done <= set(bench.output.read_bytes().splitlines())
