"""Two servers on one machine, without torchrun: each a world of one, neither disturbs the other."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.server import Server
from harness.waiting import Note
from tests.support.endpoint import NAME, Endpoint
from tests.support.faults import kill_nine, watcher_below
from tests.support.job import READY, Job, error_lines, job_environ
from tests.support.stock import PROMPTS, SMALL_FLAGS

# By hand: two servers at once take more than a minute, and CI is to stay below half an hour.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.by_hand, pytest.mark.timeout(600)]


def world_of_one(model: Path, log: Path, *flags: str) -> Job:
    """`python -m spmd_serve MODEL FLAGS`."""
    port = free_port()
    arguments = [str(model), f"--port={port}", "--host=127.0.0.1", f"--served-model-name={NAME}"]
    command = [sys.executable, "-m", "spmd_serve", *arguments, *SMALL_FLAGS, *flags]
    server = Server(command, log, environ=job_environ(), ready_line=READY)
    return Job(server, Endpoint(f"http://127.0.0.1:{port}"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key and a certificate of our own for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days=2", "-subj=/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def jobs(
    tiny_qwen3: Path, certificate: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Job, Job]]:
    """Two at once, started together: one speaks HTTP, one HTTPS."""
    log = tmp_path_factory.mktemp("alone")
    tls = [f"--ssl-keyfile={certificate / 'key.pem'}", f"--ssl-certfile={certificate / 'certificate.pem'}"]
    http, https = world_of_one(tiny_qwen3, log / "http"), world_of_one(tiny_qwen3, log / "https", *tls)
    url = https.endpoint.url.replace("http:", "https:")
    https.endpoint = Endpoint(url, authority=certificate / "certificate.pem")
    with ExitStack() as stack:
        for job in (http, https):
            stack.push(job.server)
            job.server.start()
        for job in (http, https):
            job.server.wait_ready()
        yield http, https


def test_both_answer_as_stock_does(jobs: tuple[Job, Job], stock_vllm: Endpoint) -> None:
    expected = stock_vllm.greedy(PROMPTS)
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(job.endpoint.greedy_together, PROMPTS) for job in jobs]
        assert [answer.result(120) for answer in asked] == [expected, expected]


def test_the_one_with_a_certificate_speaks_tls_only(jobs: tuple[Job, Job]) -> None:
    url = jobs[1].endpoint.url
    assert url in jobs[1].server.text()
    assert jobs[1].endpoint.call("/health")[0] == 200
    with pytest.raises(OSError):
        Endpoint(url.replace("https:", "http:")).call("/health")


def test_ctrl_c_ends_one_and_the_other_goes_on(jobs: tuple[Job, Job]) -> None:
    ending, staying = jobs
    footprint, expected = ending.footprint(), staying.endpoint.greedy(PROMPTS[:2])
    os.killpg(ending.server.pid, signal.SIGINT)
    assert ending.server.wait_exit(30) == 0, ending.server.tail()
    footprint.assert_gone(1.0)
    assert staying.endpoint.greedy(PROMPTS[:2]) == expected


def test_a_killed_watcher_ends_the_job(jobs: tuple[Job, Job], note: Note) -> None:
    job = jobs[1]
    footprint = job.footprint()
    pid = watcher_below(job.server.pid)
    kill_nine(pid)
    seconds = footprint.seconds_to_end()
    note(f"kill -9 of the watcher: the whole job is gone after {seconds:.1f} s")
    assert job.server.wait_exit(1) == 1
    (said,) = error_lines(job.server)
    assert said == f"the watcher on node {os.uname().nodename} is gone"
    footprint.assert_gone(1.0)
