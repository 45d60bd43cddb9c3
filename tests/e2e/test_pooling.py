"""An embedding model on TP=2."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.waiting import Note
from tests.support.endpoint import NAME, Endpoint
from tests.support.faults import kill_nine
from tests.support.job import ROOT, Job, torchrun_job
from tests.support.stock import ENVIRON, PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

EMBED = """
import json, os, sys
from vllm import LLM
model, prompts = json.load(sys.stdin)
llm = LLM(model, runner="pooling", dtype="float32", max_model_len=1024, max_num_seqs=8, enforce_eager=True)
vectors = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
print("vectors", json.dumps(vectors), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path) -> list[list[float]]:
    """Stock vLLM's vectors, computed on one rank."""
    environ = {**os.environ, **ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", EMBED],
        input=json.dumps([str(tiny_qwen3), PROMPTS]),
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    vectors: list[list[float]] = json.loads(done.stdout.rpartition("vectors ")[2])
    return vectors


@pytest.fixture(scope="module")
def job(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with torchrun_job(tiny_qwen3, tmp_path_factory.mktemp("pooling") / "log", "--runner=pooling") as job:
        yield job


@pytest.fixture
def ours(job: Job) -> Endpoint:
    return job.endpoint


def test_embeddings_equal_stock(ours: Endpoint, expected: list[list[float]]) -> None:
    answer = ours.client.embeddings.create(model=NAME, input=list(PROMPTS))
    for mine, theirs in zip(answer.data, expected, strict=True):
        assert mine.embedding == pytest.approx(theirs, abs=1e-5)


def test_pooling_has_its_own_route(ours: Endpoint) -> None:
    status, answer = ours.call("/pooling", {"model": NAME, "input": "a", "task": "embed"})
    assert status == 200 and len(answer["data"][0]["data"]) == 128


def test_a_killed_engine_core_ends_the_whole_job(job: Job, ours: Endpoint, note: Note) -> None:
    footprint = job.footprint()
    pid = ours.pid("engine core")
    kill_nine(pid)
    seconds = footprint.seconds_to_end()
    note(f"kill -9 of the engine core: the whole job is gone after {seconds:.1f} s")
    assert job.server.wait_exit(1) not in (0, -signal.SIGKILL)
    assert f"engine core (pid {pid}" in job.summary() and "SIGKILL" in job.summary()
    footprint.assert_gone(1.0)
