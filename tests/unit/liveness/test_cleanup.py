"""The folder for vLLM's local sockets: private, one for each round, and removed with its content."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_serve.liveness.cleanup import VARIABLE, make_scratch, remove_scratch, scratch_folder, use_scratch


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    # `tmp_path` comes first: with its first use pytest creates its base folder in `tempfile.tempdir`.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is too long for a socket
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield "@spmd-serve-0-1-2-3-0"


def test_all_processes_of_a_round_use_one_folder_which_is_removed_with_its_content(address: str) -> None:
    folder = make_scratch(address)
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    assert make_scratch(address) == folder == scratch_folder(address)
    assert make_scratch(address[:-1] + "1") != folder
    (folder / "socket").touch()
    remove_scratch(address)
    assert not folder.exists()
    remove_scratch(address)  # does nothing


@pytest.mark.parametrize("obstacle", ["file", "link", "no parent folder", "long path"])
def test_vllm_uses_its_own_folder_if_ours_cannot_be_made(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, obstacle: str
) -> None:
    folder = scratch_folder(address)
    if obstacle == "file":
        folder.touch()
    elif obstacle == "link":
        folder.symlink_to("/tmp")
    else:
        parent = str(tmp_path / "missing") if obstacle == "no parent folder" else f"/tmp/{'x' * 60}"
        monkeypatch.setattr(tempfile, "tempdir", parent)
    assert make_scratch(address) is None
    environ: dict[str, str] = {}
    use_scratch(address, environ)
    assert environ == {}


def test_a_folder_set_by_the_user_is_kept(address: str) -> None:
    given, none = {VARIABLE: "/run/mine"}, {"HOME": "/root"}
    for environ in (given, none):
        use_scratch(address, environ)
    assert given == {VARIABLE: "/run/mine"}
    assert none == {"HOME": "/root", VARIABLE: str(scratch_folder(address))}
