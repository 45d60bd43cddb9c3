"""vLLM's local sockets lie in a folder of the round, which the watcher removes, as it does shared memory."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_serve.liveness import watcher_address
from spmd_serve.liveness.cleanup import (
    SHARED,
    VARIABLE,
    make_scratch,
    remove_scratch,
    scratch_folder,
    use_scratch,
)
from tests.support.liveness import PATIENCE_S, ROUND_ID, Job
from tests.support.waiting import wait_until


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is too long for a socket
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield "@spmd-serve-0-1-2-3-0"


def test_all_processes_of_a_round_find_one_folder_and_it_goes_with_what_is_in_it(address: str) -> None:
    folder = make_scratch(address)
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    assert make_scratch(address) == folder == scratch_folder(address)
    assert make_scratch(address[:-1] + "1") != folder
    (folder / "socket").touch()
    remove_scratch(address)
    assert not folder.exists()
    remove_scratch(address)  # nothing there: nothing to do


@pytest.mark.parametrize("kind", ["file", "link", "nowhere", "long"])
def test_vllm_keeps_its_own_place_where_a_folder_can_not_be_had(
    address: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = scratch_folder(address)
    if kind == "file":
        folder.touch()
    elif kind == "link":
        folder.symlink_to("/tmp")
    else:
        monkeypatch.setattr(tempfile, "tempdir", "/nonexistent" if kind == "nowhere" else f"/tmp/{'x' * 60}")
    assert make_scratch(address) is None
    environ: dict[str, str] = {}
    use_scratch(address, environ)
    assert environ == {}


def test_a_users_own_folder_stays(address: str) -> None:
    given, none = {VARIABLE: "/run/mine"}, {"HOME": "/root"}
    for environ in (given, none):
        use_scratch(address, environ)
    assert given == {VARIABLE: "/run/mine"}
    assert none == {"HOME": "/root", VARIABLE: str(scratch_folder(address))}


def test_the_watcher_of_a_later_round_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        agent, rank = job.actor("agent"), job.actor("rank")
        left = make_scratch(watcher_address(agent.pid, 1))
        assert left is not None
        rank.do("start_watcher", agent.pid, 2, {})
        wait_until(lambda: not left.exists(), PATIENCE_S, "its removal")


def test_the_watcher_removes_it_when_nobody_is_left(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        host = job.host(0)
        job.configure()
        folder, shared = make_scratch(host.address), SHARED / f"{ROUND_ID}r0-{os.getpid()}"
        shared.touch()
        assert folder is not None
        (folder / "socket").touch()
        assert os.listdir(folder) == ["socket"]
        host.ranks[0].kill()
        job.all_gone()
    assert not folder.exists() and not shared.exists()
