"""DP=2 behind two API servers: the load spreads over both replicas."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.endpoint import Endpoint
from tests.support.faults import kill_nine
from tests.support.footprint import cpu_seconds, ports_of
from tests.support.job import Job, torchrun_job
from tests.support.processes import descendants
from tests.support.stock import PROMPTS
from tests.support.waiting import Note, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    log = tmp_path_factory.mktemp("dp") / "log"
    with torchrun_job(tiny_qwen3, log, "-dp=2", "--api-server-count=2") as job:
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
    wait_until(
        lambda: all(ours.steps()[rank] - n >= 64 for rank, n in before.items()),
        10.0,
        "64 steps more on each rank",
    )


def api_servers(job: Job) -> list[int]:
    """Who listens on the HTTP port below the process that has started them."""
    parent, engines = job.endpoint.pid("API server"), {member["pid"] for member in job.endpoint.members()}
    port = int(job.endpoint.url.rpartition(":")[2])
    children = [process.pid for process in descendants(parent) if process.pid not in engines]
    return [pid for pid in children if port in ports_of(pid)]


def test_two_api_servers_answer(job: Job, ours: Endpoint) -> None:
    servers = api_servers(job)
    assert len(servers) == 2
    before = {pid: cpu_seconds(pid) for pid in servers}

    def both_have_worked() -> bool:
        assert ours.call("/health") == (200, {"status": "ok"})
        ours.greedy_together(PROMPTS, 4)
        return all(cpu_seconds(pid) > before[pid] for pid in servers)

    wait_until(both_have_worked, 30, "both API servers to get requests")
    names = sorted(member["name"] for member in ours.members() if member["kind"] == "engine")
    assert names == ["engine core of replica 0", "engine core of replica 1"]


def test_a_killed_api_server_ends_the_whole_job(job: Job, ours: Endpoint, note: Note) -> None:
    footprint = job.footprint()
    kill_nine(api_servers(job)[1])
    seconds = footprint.seconds_to_end()
    note(f"kill -9 of one of two API servers: the whole job is gone after {seconds:.1f} s")
    assert job.server.wait_exit(1) not in (0, -signal.SIGKILL)
    assert "API server" in job.summary() and "ApiServer_" in job.summary()
    footprint.assert_gone(1.0)
