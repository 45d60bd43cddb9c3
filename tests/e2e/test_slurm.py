"""The Slurm recipe on a real Slurm of two simulated hosts."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import everybody, survivors
from harness.waiting import Note, wait_until
from tests.support import slurm
from tests.support.endpoint import NAME, Endpoint
from tests.support.job import job_environ
from tests.support.netns import Hosts
from tests.support.slurm import Slurm
from tests.support.stock import PROMPTS, SMALL_FLAGS_PP, Reference

# By hand: Slurm's packages are large, and few machines have them.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.netns, pytest.mark.by_hand]
pytestmark += [pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PORT = 8000  # inside simulated hosts every port is free
SERVE_S, END_S = 200.0, 40.0


@pytest.fixture
def cluster(can_simulate_hosts: None) -> Iterator[tuple[Hosts, Slurm]]:
    if (reason := slurm.why_not()) is not None:
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        Hosts("n0", "n1") as hosts,
        Slurm(hosts, Path(folder)) as running,
    ):
        yield hosts, running


def test_two_nodes_serve_and_scancel_ends_all(
    cluster: tuple[Hosts, Slurm], tiny_qwen3: Path, tmp_path: Path, reference: Reference, note: Note
) -> None:
    hosts, running = cluster
    expected = [answer.tokens for answer in reference.greedy(tiny_qwen3, PROMPTS, max_tokens=16)]
    log = tmp_path / "log"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = job_environ(PATH=path, MODEL=str(tiny_qwen3), GPUS="1", RESTARTS="0")
    flags = [*SMALL_FLAGS_PP, "-pp=2", f"--served-model-name={NAME}"]
    recipe = str(ROOT / "launch" / "slurm.sbatch")
    number = running.call(
        "sbatch", "--parsable", "--nodes=2", f"--output={log}", recipe, *flags, environ=environ
    ).strip()

    def is_ready() -> bool:
        text = log.read_text(errors="replace") if log.exists() else ""
        assert running.running() == [number], text
        return "spmd_serve: ready after" in text

    wait_until(is_ready, SERVE_S, "the job to be ready")
    endpoint = Endpoint(f"http://{hosts.address('n0')}:{PORT}")
    with hosts.inside("n1"):
        assert endpoint.greedy(PROMPTS, 16) == expected
        members = endpoint.members()
    assert {member["hostname"] for member in members} == {"n0", "n1"}
    pids = {member["pid"] for member in members}
    family = [one for one in everybody() if one.pid in pids or str(tiny_qwen3) in one.command]
    assert len(family) > len(pids), "torchrun's agents too"
    started = time.monotonic()
    running.call("scancel", number)
    wait_until(lambda: not running.running() and not survivors(family), END_S, "the end of the job")
    note(f"scancel: all of both nodes gone after {time.monotonic() - started:.1f} s")
