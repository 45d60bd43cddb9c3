"""What hangs is told from what is slow; what is full or cut is no reason to hang."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from harness.waiting import Note, wait_until
from tests.support.endpoint import NAME, Endpoint
from tests.support.faults import STUCK_TOKENS
from tests.support.footprint import Footprint
from tests.support.job import hosts_job, torchrun_job
from tests.support.netns import Hosts
from tests.support.stock import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STUCK = "--scheduler-cls=tests.support.stuck_scheduler.StuckScheduler"
SLOW = "--worker-extension-cls=tests.support.slow_rank.SlowRank"
RANK_TIMEOUT_S, STEP_TIMEOUT_S, LATE_S = 2.0, 12.0, 10.0


def hang(endpoint: Endpoint, seconds: float) -> None:
    """Rank 1 is busy for so long in its next message; whoever asked does not mind the job's end."""
    try:
        endpoint.call("/collective_rpc", {"method": "be_slow", "args": ["1", str(seconds)], "timeout": 60})
    except OSError:
        return


def test_a_slow_rank_lives_and_a_hung_one_writes_every_ranks_stack(
    tiny_qwen3: Path, tmp_path: Path, note: Note
) -> None:
    flags = (SLOW, f"--rank-timeout={RANK_TIMEOUT_S}", f"--step-timeout={STEP_TIMEOUT_S}")
    job = torchrun_job(tiny_qwen3, tmp_path / "log", *flags, environ={"VLLM_SERVER_DEV_MODE": "1"})
    with job:
        hang(job.endpoint, 3 * RANK_TIMEOUT_S)
        assert job.endpoint.greedy(PROMPTS[:1], 4)
        footprint, started = job.footprint(), time.monotonic()
        client = Thread(target=hang, args=(job.endpoint, 60.0), daemon=True)
        client.start()
        gone = footprint.seconds_to_end(STEP_TIMEOUT_S + LATE_S)
        note(f"a step hangs, --step-timeout {STEP_TIMEOUT_S:g}: all gone after {gone:.2f} s")
        assert time.monotonic() - started > STEP_TIMEOUT_S
        assert job.server.wait_exit(5.0) not in (0, -signal.SIGKILL)
        client.join(10.0)
    text = job.server.text()
    assert re.search(r"rank 1 \(pid \d+, node \S+\) hung: step \d+ has made no progress", job.summary())
    asked = re.search(r"^spmd_serve watcher: asking (.*) for stacks$", text, re.MULTILINE)
    assert asked is not None and "rank 0" in asked[1] and "rank 1" in asked[1]
    assert "in be_slow" in text and text.count("most recent call first") >= 2


@pytest.mark.by_hand  # one more start of an engine
def test_an_engine_core_that_hangs_between_steps_is_named(
    tiny_qwen3: Path, tmp_path: Path, note: Note
) -> None:
    """As by a deadlock: its other threads send heartbeats, and no rank is in a step."""
    with torchrun_job(tiny_qwen3, tmp_path / "log", STUCK, "--step-timeout=6") as job:
        assert job.endpoint.greedy(PROMPTS[:1], 4)
        footprint, started = job.footprint(), time.monotonic()
        body = {"model": NAME, "prompt": "a", "max_tokens": STUCK_TOKENS}
        status, answer = job.endpoint.call("/v1/completions", body)
        answered_s = time.monotonic() - started
        gone = answered_s + footprint.seconds_to_end(LATE_S)
        note(
            f"an engine core hangs, --step-timeout 6: its client knew after {answered_s:.2f} s, "
            f"all gone after {gone:.2f} s"
        )
        assert status in (500, 503) and answer["error"]["code"] == status
        assert answered_s > 11.0  # 5 s after a rank would be reported
        assert job.server.wait_exit(5.0) not in (0, -signal.SIGKILL)
    assert re.search(r"engine core \(pid \d+, node \S+\) hung: its loop has made no progress", job.summary())
    assert "in schedule" in job.server.text()


@pytest.mark.by_hand  # one more start of an engine
def test_a_full_disk_for_the_logs_does_not_end_the_job_nor_hide_its_end(
    tiny_qwen3: Path, tmp_path: Path, note: Note
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], check=True)
    try:
        with torchrun_job(tiny_qwen3, folder / "log") as job:
            with (folder / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
                while True:
                    filler.write(b"x" * 512)
            expected = job.endpoint.greedy(PROMPTS[:2], 16)
            assert job.endpoint.greedy(PROMPTS[:2], 16) == expected
            footprint = job.footprint()
            os.kill(job.endpoint.pid("rank 1"), signal.SIGKILL)
            gone = footprint.seconds_to_end(LATE_S)
            note(f"kill -9 of rank 1 while the logs' disk is full: all gone after {gone:.2f} s")
            assert job.server.wait_exit(5.0) not in (0, -signal.SIGKILL)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def hosts(can_simulate_hosts: None) -> Iterator[Hosts]:
    with Hosts("node0", "node1") as hosts:
        yield hosts


@pytest.mark.by_hand  # the same cut is made in test_recovery.py, without a model
@pytest.mark.netns
@pytest.mark.parametrize("busy", [False, True])
def test_a_cut_link_under_a_pipeline(
    hosts: Hosts, tiny_qwen3: Path, tmp_path: Path, note: Note, busy: bool
) -> None:
    flags = ("-tp=1", "-pp=2")  # the default --rank-timeout of 10 s
    with hosts_job(hosts, tiny_qwen3, tmp_path, *flags).running() as job:
        # Without its agents: the cut-off one waits for torchrun's store for minutes.
        with hosts.inside("node0"):
            ranks = [member["pid"] for member in job.endpoint.members() if member["kind"] == "rank"]
        assert len(ranks) == 2
        footprint = Footprint.of(*ranks)

        def ask() -> None:
            with hosts.inside("node0"):
                try:
                    job.endpoint.greedy(PROMPTS[:1], 900)
                except Exception:
                    return

        client = Thread(target=ask, daemon=True)
        if busy:
            client.start()
            with hosts.inside("node0"):
                before = job.endpoint.steps()
                wait_until(lambda: job.endpoint.steps()[1] > before[1] + 20, 30.0, "steps of rank 1")
        hosts.cut("node1")
        gone = footprint.seconds_to_end(10.0 + LATE_S)
        how = "busy" if busy else "idle"
        note(f"link cut, --rank-timeout 10, {how}: the last process is gone after {gone:.1f} s")
        if busy:
            client.join(10.0)
        text = job.servers["node0"].text()
        assert "node node1 (rank 1) has been silent for" in text
