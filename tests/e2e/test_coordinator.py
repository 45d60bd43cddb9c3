"""vLLM's coordinator of replicas is watched like every other process."""

import os
import signal
from pathlib import Path

import pytest

from harness.waiting import Note
from tests.support.crowd import ENDLESS, ROOM, Crowd
from tests.support.faults import freeze, kill_nine
from tests.support.footprint import Footprint
from tests.support.job import Job, torchrun_job
from tests.support.stock import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "coordinator of replicas"
RANK_TIMEOUT_S = 4.0


def job_of_two_replicas(model: Path, log: Path) -> Job:
    """One API server: with several, vLLM notices a coordinator's death itself."""
    flags = ("-dp=2", "--api-server-count=1", f"--rank-timeout={RANK_TIMEOUT_S:g}")
    return torchrun_job(model, log, *flags)


@pytest.mark.by_hand  # one more start of two engines for each
def test_one_that_stands_still_ends_the_job(tiny_qwen3: Path, tmp_path: Path, note: Note) -> None:
    with job_of_two_replicas(tiny_qwen3, tmp_path / "log") as job:
        footprint, victim = job.footprint(), job.endpoint.pid(NAME)
        freeze(victim)
        ends_with_the_job(job, footprint, victim, "has been stopped", note, "SIGSTOP", RANK_TIMEOUT_S)


@pytest.mark.by_hand
def test_a_killed_one_ends_the_job(tiny_qwen3: Path, tmp_path: Path, note: Note) -> None:
    with job_of_two_replicas(tiny_qwen3, tmp_path / "log") as job:
        footprint, victim = job.footprint(), job.endpoint.pid(NAME)
        kill_nine(victim)
        ends_with_the_job(job, footprint, victim, "was killed by SIGKILL", note, "kill -9", 0.0)


@pytest.mark.parametrize("method", [None, pytest.param("spawn", marks=pytest.mark.by_hand)])
def test_it_leaves_with_the_job_and_not_before(tiny_qwen3: Path, tmp_path: Path, method: str | None) -> None:
    """Two API servers too, which vLLM would kill at once for --shutdown-timeout 0."""
    environ = {"VLLM_WORKER_MULTIPROC_METHOD": method} if method else {}
    flags = ("-dp=2", "--shutdown-timeout=0", ROOM)
    with torchrun_job(tiny_qwen3, tmp_path / "log", *flags, environ=environ) as job:
        with Crowd(job.endpoint.url, streams=2, plain=0, tokens=ENDLESS) as crowd:
            crowd.wait_begun()
            coordinator = job.endpoint.pid(NAME)
            os.kill(coordinator, signal.SIGTERM)  # systemd's, to every process: rank 0 has not heard it here
            assert job.endpoint.greedy_together(PROMPTS, 16)
            assert job.endpoint.pid(NAME) == coordinator
            os.kill(job.endpoint.pid("rank 0"), signal.SIGTERM)
            crowd.wait_ended()
        assert job.server.wait_exit(30.0) == 0, job.server.tail()
    assert [request.broken for request in crowd.requests] == [None, None]
    assert all(request.error is not None for request in crowd.requests)
    assert "the job has failed" not in job.server.text()


def ends_with_the_job(
    job: Job, footprint: Footprint, victim: int, words: str, note: Note, fault: str, limit_s: float
) -> None:
    seconds = footprint.seconds_to_end(limit_s + 10.0)
    note(f"{fault} of the {NAME}, --rank-timeout {RANK_TIMEOUT_S:g}: all gone after {seconds:.2f} s")
    assert job.server.wait_exit(5.0) not in (0, -signal.SIGKILL)
    assert f"{NAME} (pid {victim}, node {os.uname().nodename}) {words}" in job.summary()
    footprint.assert_gone(1.0)
