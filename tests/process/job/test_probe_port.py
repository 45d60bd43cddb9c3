"""The probe port of a job without a model: it opens, reopens after a restart, or is in use."""

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.waiting import Note, wait_until
from tests.support.faults import kill_nine
from tests.support.job import error_lines
from tests.support.recovery import light_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def probe(port: int, path: str) -> tuple[int, str]:
    """Return status and body; status 0 if nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()
    except OSError:
        return 0, ""


def metric(port: int, name: str) -> float:
    lines = probe(port, "/metrics")[1].splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith(f"spmd_serve_{name} "))
    return float(value)


def test_the_port_reopens_after_a_failure_and_the_metrics_count_it(tmp_path: Path, note: Note) -> None:
    port = free_port()
    with light_job(tmp_path, f"--probe-port={port}", ranks=2, max_restarts=1) as job:
        job.start()
        before = job.served()
        wait_until(lambda: probe(port, "/ready")[0] == 200, 30.0, "the first round to be ready")
        assert metric(port, "failures_total") == 0
        kill_nine(before["pids"]["rank 1"])
        job.served(before)
        wait_until(lambda: probe(port, "/ready")[0] == 200, 30.0, "the second round to be ready")
        assert json.loads(probe(port, "/live")[1]) == {"status": "live"}
        assert metric(port, "failures_total") == 1
        detect = metric(port, "last_failure_detect_seconds")
        recover = metric(port, "last_failure_recover_seconds")
        note(f"kill -9 of rank 1: detected after {detect:.2f} s, serving again {recover:.2f} s later")
        assert 0 <= detect < 2.0 and 0 < recover < 90.0


def test_a_port_in_use_is_one_line_on_every_rank(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with light_job(tmp_path, f"--probe-port={port}", ranks=2) as job:
            job.start()
            assert job.servers[0].wait_exit(60.0) not in (0, -signal.SIGKILL)
            lines = error_lines(job.servers[0])
    # A rank that ends because of the root cause before it can report writes nothing.
    assert 1 <= len(lines) <= 2 and set(lines) == {lines[0]}
    assert f"--probe-port {port} cannot be opened on {os.uname().nodename}: " in lines[0]
    assert "already in use" in lines[0]
