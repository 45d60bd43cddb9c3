"""torchrun restarts failed jobs. The faults are real; the jobs serve no model, so that rounds are short."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.processes import descendants
from harness.server import Server
from harness.waiting import Note, wait_until
from tests.support.faults import freeze, frozen, kill_nine, rank_processes, watcher_below
from tests.support.footprint import Footprint
from tests.support.netns import Hosts
from tests.support.recovery import LightJob, Round, detected, light_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GONE_S = 25.0
"""Seconds after a fault within which all processes of the old round must have ended."""
JOINED_S = 40.0
"""The same, counted from the start of a torchrun that joins."""

by_hand = pytest.mark.by_hand  # variants of the tests that run by default; together they take minutes


def api_server(agent: int) -> int:
    """Return the pid of rank 0's child."""
    (rank,) = (process for number, process in rank_processes(agent).items() if number == 0)
    (child,) = (child for child in descendants(rank.pid) if child.pid != watcher_below(agent))
    return child.pid


def recovers(
    job: LightJob,
    before: Round,
    fault: str,
    make: Callable[[], object],
    note: Note,
    gone_s: float = GONE_S,
) -> Round:
    """Make a fault; check that the old round ends completely and that a new one serves."""
    old = job.ranks()
    started, clock = time.monotonic(), time.time()
    make()
    gone = old.seconds_to_end(gone_s)
    after = job.served(before)
    served_s = time.monotonic() - started
    seen = detected(after["detected_at"], clock)
    note(f"{fault}: {seen}all gone after {gone:.2f} s, serving again after {served_s:.2f} s")
    assert not set(after["pids"].values()) & set(before["pids"].values())
    assert not old.left()
    return after


def test_five_deaths_of_five_processes_on_one_agent(tmp_path: Path, note: Note) -> None:
    with light_job(tmp_path, "--rank-timeout=6", ranks=2, max_restarts=5) as job:
        job.start()
        agent = job.servers[0].pid
        first = now = job.served()
        rank = rank_processes(agent)
        faults: list[tuple[str, Callable[[], object]]] = [
            ("kill -9 of rank 1", lambda: kill_nine(now["pids"]["rank 1"])),
            ("kill -9 of the API server", lambda: kill_nine(api_server(agent))),
            ("kill -9 of rank 0", lambda: kill_nine(now["pids"]["rank 0"])),
            ("kill -9 of the watcher", lambda: kill_nine(watcher_below(agent))),
            ("SIGSTOP of rank 1, --rank-timeout 6", lambda: freeze(now["pids"]["rank 1"])),
        ]
        assert {process.pid for process in rank.values()} == set(first["pids"].values())
        for fault, make in faults:
            now = recovers(job, now, fault, make, note)
        text = job.servers[0].text()
    for cause in (
        rf"rank 1 (pid {first['pids']['rank 1']}, node {os.uname().nodename}) was killed by SIGKILL",
        "API server",
        "rank 0",
        f"the watcher on node {os.uname().nodename} is gone",
    ):
        assert cause in text
    assert re.search(r"rank 1 .* has been stopped \(SIGSTOP\) for [45](\.\d)? s", text)


@pytest.mark.parametrize("backend", [pytest.param("c10d", marks=by_hand), "static"])
def test_two_agents_restart(tmp_path: Path, note: Note, backend: str) -> None:
    """With static rendezvous each agent restarts its own ranks without knowledge of the other agent."""
    with light_job(
        tmp_path, "-tp=1", "-pp=2", agents=2, backend=backend, max_restarts=3, shared_store=True
    ) as job:
        job.start()
        now = job.served()
        for rank in ("rank 1", "rank 0", "rank 1"):
            now = recovers(job, now, f"{backend}: {rank}", lambda: kill_nine(now["pids"][rank]), note)  # noqa: B023


@by_hand
@pytest.mark.parametrize("shared_store", [True, False])
def test_a_kill_during_the_restart_after_another(tmp_path: Path, note: Note, shared_store: bool) -> None:
    flags = ("-tp=1", "-pp=2")
    with light_job(tmp_path, *flags, agents=2, max_restarts=4, shared_store=shared_store) as job:
        job.start()
        now = job.served()
        kill_nine(now["pids"]["rank 1"])
        agent = job.servers[1].pid

        def new_rank() -> int | None:
            found = rank_processes(agent).get(1) or rank_processes(agent).get(0)
            return found.pid if found and found.pid not in now["pids"].values() else None

        fresh = wait_until(new_rank, 30.0, "the second agent's new rank")
        recovers(job, now, "a kill during the restart", lambda: kill_nine(fresh), note)


@pytest.mark.netns
def test_a_cut_link_ends_the_job_on_both_sides_and_the_node_rejoins(
    can_simulate_hosts: None, tmp_path: Path, note: Note
) -> None:
    with Hosts("node0", "node1") as hosts:
        flags = ("-tp=1", "-dp=auto", "--rank-timeout=5")
        with light_job(tmp_path, *flags, nnodes="1:2", max_restarts=3, hosts=hosts) as job:
            job.start()
            now = job.served()
            while now["dp"] < 2:
                now = job.served(now)
            now = recovers(job, now, "link cut, --rank-timeout 5", lambda: hosts.cut("node1"), note, 35.0)
            assert now["dp"] == 1
            assert "node node1 (rank 1) has been silent for" in job.servers[0].text()
            job.servers[1].end()
            hosts.mend("node1")
            now = recovers(job, now, "the cut node joins again", lambda: job.start(1), note, JOINED_S)
            assert now["dp"] == 2


@by_hand
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_killed_agent_is_restarted(tmp_path: Path, note: Note, backend: str) -> None:
    """A supervisor runs the same command again, and the job, which waits for the agent, continues."""
    with light_job(tmp_path, "-tp=1", "-pp=2", agents=2, backend=backend, max_restarts=3) as job:
        job.start()
        now = job.served()
        other = job.servers[1]

        def replace_agent() -> None:
            kill_nine(other.pid)
            assert other.wait_exit(1.0) == -signal.SIGKILL
            other.start()

        recovers(job, now, f"{backend}: an agent killed and started again", replace_agent, note)


@by_hand
def test_an_agent_that_dies_ends_its_ranks_and_the_others_continue(tmp_path: Path, note: Note) -> None:
    with light_job(tmp_path, "-tp=1", "-dp=auto", agents=2, nnodes="1:2", max_restarts=3) as job:
        job.start()
        now = job.served()
        if now["dp"] == 1:
            now = job.served(now)
        assert now["dp"] == 2
        below = Footprint.of(job.servers[1].pid)
        now = recovers(job, now, "kill -9 of an agent", lambda: kill_nine(job.servers[1].pid), note)
        assert now["dp"] == 1
        below.assert_gone(1.0)


def test_a_node_joins_and_leaves(tmp_path: Path, note: Note) -> None:
    with light_job(tmp_path, "-tp=1", "-dp=auto", agents=3, nnodes="2:3", max_restarts=3) as job:
        job.start(0, 1)
        now = job.served()
        while now["dp"] < 2:
            now = job.served(now)
        now = recovers(job, now, "a node joins", lambda: job.start(2), note, JOINED_S)
        assert now["dp"] == 3
        now = recovers(job, now, "a node's ranks and agent killed", lambda: job.servers[2].kill(), note)
        assert now["dp"] == 2
        texts = [server.text() for server in job.servers]
    assert "--data-parallel-size auto: 3 (of TP 1 x PP 1, on 3 ranks of 3 of at most 3 nodes)" in "".join(
        texts
    )


@by_hand
def test_a_world_that_makes_no_replica_waits_for_a_node(tmp_path: Path, note: Note) -> None:
    with light_job(tmp_path, "-tp=1", "-pp=3", "-dp=auto", agents=3, nnodes="2:3", max_restarts=3) as job:
        job.start(0, 1)
        job.servers[0].wait_line("waiting for more nodes", 60.0)
        started = time.monotonic()
        job.start(2)
        now = job.served()
        note(f"served {time.monotonic() - started:.2f} s after the missing node was started")
        assert (now["dp"], len(now["hostnames"])) == (1, 3)


def test_a_world_that_makes_no_replica_is_an_error(tmp_path: Path) -> None:
    flags = ("-tp=1", "-pp=3", "-dp=auto", "--join-timeout=4")
    with light_job(tmp_path, *flags, agents=2, nnodes="2:3") as job:
        job.start()
        codes = [server.wait_exit(90.0) for server in job.servers]
        assert all(code not in (0, -signal.SIGKILL) for code in codes)
        for server in job.servers:
            assert (
                "a replica takes --tensor-parallel-size 1 x --pipeline-parallel-size 3 = 3 ranks"
                in server.text()
            )


@by_hand
@pytest.mark.etcd
@pytest.mark.parametrize("backend", ["etcd-v2", "etcd"])
def test_two_agents_restart_with_etcd(
    etcd: tuple[Server, str], tmp_path: Path, note: Note, backend: str
) -> None:
    flags = ("-tp=1", "-pp=2", "--rank-timeout=3")
    with light_job(tmp_path, *flags, agents=2, backend=backend, endpoint=etcd[1], max_restarts=3) as job:
        job.start()
        now = job.served()
        for rank in ("rank 1", "rank 0"):
            now = recovers(job, now, f"{backend}: {rank}", lambda: kill_nine(now["pids"][rank]), note)  # noqa: B023


@by_hand
@pytest.mark.etcd
def test_a_stopped_etcd_does_not_disturb_a_running_job(
    etcd: tuple[Server, str], tmp_path: Path, note: Note
) -> None:
    """Only a rendezvous needs etcd: torchrun's heartbeats fail and continue when it is back."""
    with light_job(
        tmp_path, "-tp=1", "-pp=2", agents=2, backend="etcd-v2", endpoint=etcd[1], max_restarts=3
    ) as job:
        job.start()
        now = job.served()
        with frozen(etcd[0].pid):
            time.sleep(5.0)  # longer than torchrun's keep-alive
            assert job.round_now() == now
        recovers(
            job, now, "etcd was stopped and continues: rank 1", lambda: kill_nine(now["pids"]["rank 1"]), note
        )
