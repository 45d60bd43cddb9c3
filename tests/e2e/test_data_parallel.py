"""DP=2 behind two API servers: the load spreads over both replicas."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import descendants
from harness.waiting import Note, wait_until
from tests.support.crowd import ENDLESS, ROOM, Crowd
from tests.support.endpoint import Endpoint
from tests.support.faults import kill_nine, pid_of_rank
from tests.support.footprint import cpu_seconds, ports_of
from tests.support.job import Job, torchrun_job
from tests.support.stock import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    log = tmp_path_factory.mktemp("dp") / "log"
    with torchrun_job(tiny_qwen3, log, "-dp=2", "--api-server-count=2", ROOM) as job:
        yield job


@pytest.fixture
def ours(job: Job) -> Endpoint:
    return job.endpoint


def test_tokens_equal_stock(ours: Endpoint, stock_vllm: Endpoint) -> None:
    assert ours.greedy_together(PROMPTS) == stock_vllm.greedy(PROMPTS)


def test_both_replicas_work(ours: Endpoint) -> None:
    before = ours.steps()
    assert set(before) == {0, 1}
    ours.greedy_together(PROMPTS, 64)
    ours.wait_steps(before, 64)


def api_servers(job: Job) -> list[int]:
    """Who listens on the HTTP port below the process that has started them."""
    port = int(job.endpoint.url.rpartition(":")[2])
    below = [process.pid for process in descendants(job.endpoint.pid("API server"))]
    return [pid for pid in below if port in ports_of(pid)]


def test_two_api_servers_answer(job: Job, ours: Endpoint) -> None:
    servers = api_servers(job)
    assert len(servers) == 2
    before = {pid: cpu_seconds(pid) for pid in servers}

    def both_have_worked() -> bool:
        assert ours.call("/health") == (200, {"status": "ok"})
        ours.greedy_together(PROMPTS, 4)
        return all(cpu_seconds(pid) > before[pid] for pid in servers)

    wait_until(both_have_worked, 30, "both API servers to get requests")
    names = sorted(member["name"] for member in ours.members() if member["kind"] != "rank")
    assert names == [
        "API server",
        "API server 0",
        "API server 1",
        "coordinator of replicas",
        "engine core of replica 0",
        "engine core of replica 1",
    ]


def test_a_killed_api_server_ends_the_whole_job(job: Job, ours: Endpoint, note: Note) -> None:
    """The root cause names it, and the other endpoint has time to answer its clients."""
    footprint, victim = job.footprint(), api_servers(job)[1]
    with Crowd(ours.url, streams=8, plain=0, tokens=ENDLESS) as crowd:
        crowd.wait_begun()
        kill_nine(victim)
        seconds = footprint.seconds_to_end()
        crowd.wait_ended()
    informed = sum(request.broken is None and request.error is not None for request in crowd.requests)
    note(
        f"kill -9 of one of two API servers, 8 streams: the whole job is gone after {seconds:.1f} s, "
        f"{informed} clients got an error"
    )
    assert not any(request.is_complete for request in crowd.requests)
    assert job.server.wait_exit(1) not in (0, -signal.SIGKILL)
    assert f"(pid {victim}, node {os.uname().nodename}) was killed by SIGKILL" in job.summary()
    footprint.assert_gone(1.0)


@pytest.mark.parametrize("shards", ["not loaded", pytest.param("loaded", marks=pytest.mark.by_hand)])
def test_sigterm_while_engines_load_is_a_normal_end(
    tiny_qwen3: Path, tmp_path: Path, note: Note, shards: str
) -> None:
    job = torchrun_job(tiny_qwen3, tmp_path / "log", "-dp=2")
    job.server.start()
    try:

        def loading() -> bool:
            if shards == "loaded":
                return "KV cache memory: rank" in job.server.text()
            return sum("EngineCore" in process.command for process in descendants(job.server.pid)) == 2

        wait_until(loading, 180.0, f"two engine cores\n{job.server.tail()}")
        started = time.monotonic()
        os.kill(pid_of_rank(job.server.pid, 0), signal.SIGTERM)
        code = job.server.wait_exit(30.0)
        seconds = time.monotonic() - started
        note(f"SIGTERM while two engine cores load, shards {shards}: ended after {seconds:.1f} s")
    finally:
        job.server.end()
    assert code == 0, job.server.tail()
    assert "the job has failed" not in job.server.text()
