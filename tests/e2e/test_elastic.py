"""A served model on nodes that come and go: `torchrun --nnodes 1:2 … -dp auto`."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.processes import kill
from harness.waiting import Note, wait_until
from tests.support.job import UNSHARED, HostsJob, hosts_job
from tests.support.netns import Hosts
from tests.support.stock import PROMPTS

# Three starts of an engine or more; test_recovery.py does the same without a model.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.netns, pytest.mark.by_hand]
pytestmark += [pytest.mark.timeout(900)]

SERVE_S = 300.0


def replicas(job: HostsJob) -> int:
    """How many ranks (of one replica each) answer now; 0 while nothing is served."""
    head = job.servers[job.head]
    assert head.returncode is None, head.tail()
    with job.hosts.inside(job.head):
        try:
            if job.endpoint.call("/health")[0] != 200:
                return 0
            job.endpoint.greedy(PROMPTS[:1], 4)
            return sum(member["kind"] == "rank" for member in job.endpoint.members())
        except Exception:
            return 0


def test_an_idle_node_dies_and_another_joins(
    can_simulate_hosts: None, tiny_qwen3: Path, tmp_path: Path, note: Note
) -> None:
    with Hosts("node0", "node1") as hosts, ExitStack() as ends:
        flags = ("-tp=1", "-dp=auto", "--rank-timeout=4")
        job = hosts_job(hosts, tiny_qwen3, tmp_path, *flags, max_restarts=3, nnodes="1:2", environ=UNSHARED)
        for server in job.servers.values():
            ends.callback(server.end)
            server.start()
        wait_until(lambda: replicas(job) == 2, SERVE_S, "two replicas")
        with hosts.inside("node0"):
            expected = job.endpoint.greedy(PROMPTS, 16)
        dying, started = hosts.processes("node1"), time.monotonic()
        hosts.cut("node1")
        kill(dying)
        wait_until(lambda: replicas(job) == 1, SERVE_S, "the replica that is left")
        note(f"an idle node dies: the other serves alone after {time.monotonic() - started:.1f} s")
        with hosts.inside("node0"):
            assert job.endpoint.greedy(PROMPTS, 16) == expected
        hosts.mend("node1")
        job.servers["node1"].wait_exit(5.0)
        started = time.monotonic()
        job.servers["node1"].start()
        wait_until(lambda: replicas(job) == 2, SERVE_S, "two replicas again")
        note(f"a node joins: both serve after {time.monotonic() - started:.1f} s")
        with hosts.inside("node0"):
            assert job.endpoint.greedy(PROMPTS, 16) == expected
        said = job.servers["node0"].text()
    assert "--data-parallel-size auto: 2 (of TP 1 x PP 1, on 2 ranks of 2 of at most 2 nodes)" in said
    assert "--data-parallel-size auto: 1 (of TP 1 x PP 1, on 1 ranks of 1 of at most 2 nodes)" in said
