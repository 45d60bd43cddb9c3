"""The watcher removes what a round leaves behind: vLLM's socket folder and shared memory."""

import os
from pathlib import Path

from harness.waiting import wait_until
from spmd_serve.liveness import watcher_address
from spmd_serve.liveness.cleanup import SHARED, make_scratch
from tests.support.liveness import PATIENCE_S, ROUND_ID, Job


def test_the_watcher_of_a_later_round_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        agent, rank = job.actor("agent"), job.actor("rank")
        left = make_scratch(watcher_address(agent.pid, 1))
        assert left is not None
        rank.do("start_watcher", agent.pid, 2, {})
        wait_until(lambda: not left.exists(), PATIENCE_S, "its removal")


def test_the_watcher_removes_it_when_no_member_is_left(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        node = job.node(0)
        job.configure()
        folder, shared = make_scratch(node.address), SHARED / f"{ROUND_ID}r0-{os.getpid()}"
        shared.touch()
        assert folder is not None
        (folder / "socket").touch()
        assert os.listdir(folder) == ["socket"]
        node.ranks[0].kill()
        job.all_gone()
    assert not folder.exists() and not shared.exists()
