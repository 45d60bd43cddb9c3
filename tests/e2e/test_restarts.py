"""A served model whose job fails, and which torchrun serves again: same port and answers, nothing left."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.processes import wait_exit
from harness.waiting import Note, wait_until
from tests.support.agents import agents_job
from tests.support.crowd import ENDLESS, ROOM, Crowd
from tests.support.endpoint import Endpoint
from tests.support.faults import freeze, watcher_below
from tests.support.job import Job, torchrun_job
from tests.support.recovery import detected
from tests.support.stock import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

GONE_S = 20.0
"""Deadline, for a busy machine, of what takes up to 2 s."""
SERVE_S = 150.0
RANK_TIMEOUT_S = 4.0
CLIENTS = 20

Fault = Callable[[int], object]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def serves(job: Job, expected: list[list[int]]) -> bool:
    """Whether it answers, and as before."""
    assert job.server.returncode is None, job.server.tail()
    return answers_as_before(job.endpoint, expected)


def answers_as_before(endpoint: Endpoint, expected: list[list[int]]) -> bool:
    try:
        return endpoint.greedy(PROMPTS[:2], 16) == expected
    except Exception:
        return False


def comes_back(job: Job, name: str, fault: Fault, expected: list[list[int]], note: Note, clients: int) -> str:
    """Makes the fault, with clients whose answers run or without; returns what was said of its cause."""
    pid = watcher_below(job.server.pid) if name == "watcher" else job.endpoint.pid(name)
    old, said = job.round_footprint(), len(job.server.text())
    stopped = fault is freeze
    with Crowd(job.endpoint.url, streams=clients, plain=0, tokens=ENDLESS) as crowd:
        crowd.wait_begun()
        started, clock = time.monotonic(), time.time()
        fault(pid)
        gone = old.seconds_to_end(GONE_S + (RANK_TIMEOUT_S if stopped else 0.0))
        crowd.wait_ended(GONE_S)
    assert not any(request.is_complete for request in crowd.requests)
    waits = sorted(request.ended_at - started for request in crowd.requests if request.ended_at is not None)
    errors = sum(request.broken is None and request.error is not None for request in crowd.requests)
    wait_until(lambda: serves(job, expected), SERVE_S, f"the job to serve again\n{job.server.tail()}")
    again = time.monotonic() - started
    last = job.endpoint.call("/topology")[1]["history"].get("last", {})
    seen = detected(last.get("detected_at", 0.0), clock)
    note(
        f"{'SIGSTOP' if stopped else 'kill -9'} of {name}, {clients} streams: {seen}"
        f"all gone after {gone:.2f} s, "
        + (
            f"clients knew after {waits[0]:.2f} to {waits[-1]:.2f} s ({errors} by an error), "
            if waits
            else ""
        )
        + f"served again after {again:.1f} s"
    )
    assert not old.left(), "names in /dev/shm are left"
    return job.server.text()[said:]


def test_a_rank_killed_under_streams_and_a_stopped_one(tiny_qwen3: Path, tmp_path: Path, note: Note) -> None:
    flags = (f"--rank-timeout={RANK_TIMEOUT_S:g}", f"--max-num-seqs={CLIENTS}", ROOM)
    with torchrun_job(tiny_qwen3, tmp_path / "log", *flags, max_restarts=2) as job:
        expected = job.endpoint.greedy(PROMPTS[:2], 16)
        victim = job.endpoint.pid("rank 1")
        text = comes_back(job, "rank 1", kill, expected, note, CLIENTS)
        assert f"rank 1 (pid {victim}, node {os.uname().nodename}) was killed by SIGKILL" in text
        victim = job.endpoint.pid("rank 0")
        text = comes_back(job, "rank 0", freeze, expected, note, 0)
        assert f"rank 0 (pid {victim}, node {os.uname().nodename}) has been stopped (SIGSTOP)" in text


@pytest.mark.by_hand  # six starts of an engine for each
@pytest.mark.parametrize("clients", [0, CLIENTS])
def test_five_kills_of_five_processes(tiny_qwen3: Path, tmp_path: Path, note: Note, clients: int) -> None:
    flags = (f"--max-num-seqs={CLIENTS}", ROOM)
    with torchrun_job(tiny_qwen3, tmp_path / "log", *flags, max_restarts=5) as job:
        expected = job.endpoint.greedy(PROMPTS[:2], 16)
        for name in ("rank 1", "API server", "engine core", "watcher", "rank 0"):
            comes_back(job, name, kill, expected, note, clients)
        agent = job.footprint()
        started = time.monotonic()
        kill(job.server.pid)
        assert wait_exit(job.server.pid, GONE_S)
        agent.assert_gone(GONE_S)
        note(f"kill -9 of the agent: all gone after {time.monotonic() - started:.2f} s")


@pytest.mark.by_hand  # three starts of an engine
def test_a_kill_while_the_model_loads(tiny_qwen3: Path, tmp_path: Path, note: Note) -> None:
    """In the first round, and in the round that torchrun starts after that."""
    job = torchrun_job(tiny_qwen3, tmp_path / "log", max_restarts=2)
    job.server.start()
    try:
        for round_number in (1, 2):
            table = wait_until(
                lambda: job.server.text().split("rank  host ")[round_number:],  # noqa: B023
                SERVE_S,
                "the start table",
            )
            victim = int(table[0].splitlines()[2].split()[6])
            old, started = job.round_footprint(), time.monotonic()
            kill(victim)
            gone = old.seconds_to_end(GONE_S)
            note(f"kill -9 of rank 1 while loading: all gone after {gone:.2f} s")
        wait_until(lambda: answers(job) and job.endpoint.greedy(PROMPTS[:1], 4), SERVE_S, "an answer")
        note(f"served {time.monotonic() - started:.1f} s after the second kill")
    finally:
        job.server.end()


@pytest.mark.by_hand  # three starts of an engine for each
@pytest.mark.parametrize("backend", ["c10d", "static", pytest.param("etcd-v2", marks=pytest.mark.etcd)])
def test_two_agents_with_a_model(
    tiny_qwen3: Path, tmp_path: Path, note: Note, backend: str, request: pytest.FixtureRequest
) -> None:
    meeting = request.getfixturevalue("etcd")[1] if backend == "etcd-v2" else None
    job = agents_job(
        *(tiny_qwen3, tmp_path, "-tp=1", "-pp=2"),
        nodes=2,
        ranks=1,
        backend=backend,
        meeting=meeting,
        max_restarts=2,
    )
    with job.running() as running:
        (endpoint,) = running.endpoints
        expected = endpoint.greedy(PROMPTS[:2], 16)
        for name in ("rank 1", "rank 0"):
            pid, started = endpoint.pid(name), time.monotonic()
            kill(pid)
            wait_until(
                lambda: answers_as_before(endpoint, expected),
                SERVE_S,
                f"an answer after the death of {name}\n{running.text()}",
            )
            assert endpoint.pid(name) != pid
            note(
                f"{backend}, two agents: {name} killed: served again after {time.monotonic() - started:.1f} s"
            )


def answers(job: Job) -> bool:
    """Whether its endpoint says that it is healthy."""
    assert job.server.returncode is None, job.server.tail()
    try:
        return job.endpoint.call("/health")[0] == 200
    except OSError:
        return False
