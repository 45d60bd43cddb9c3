"""A process's last words reach people, and torchrun's summary."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from spmd_serve.errors import PeerLost, SpmdError, UsageError
from spmd_serve.system.network import host_name
from spmd_serve.system.report import report


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As torchrun's agent sets it for a rank."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "3")
    return path


def summary(path: Path) -> str:
    """What torchrun prints when a rank has failed."""
    failure = ProcessFailure(local_rank=1, pid=42, exitcode=1, error_file=str(path))
    return str(ChildFailedError("spmd_serve", {1: failure}).format_msg())  # type: ignore[no-untyped-call]


def test_a_persons_mistake_is_one_line(capfd: pytest.CaptureFixture[str], error_file: Path) -> None:
    report(UsageError("--port 80 is taken"))
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"spmd_serve: rank 3 on {host_name()}: error: --port 80 is taken\n")


def test_without_torchrun_the_line_has_no_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    report(SpmdError("no"))
    assert capfd.readouterr().err == f"spmd_serve: {host_name()}: error: no\n"


def test_torchruns_summary_shows_the_same(error_file: Path) -> None:
    report(PeerLost("rank 7 (pid 1, host b) was killed by SIGKILL"), quiet=True)
    failure = ProcessFailure(local_rank=1, pid=42, exitcode=1, error_file=str(error_file))
    assert failure.timestamp > 1_700_000_000
    text = summary(error_file)
    assert f"rank 3 on {host_name()}: rank 7 (pid 1, host b) was killed by SIGKILL" in text
    assert "To enable traceback" not in text


def test_quiet_leaves_only_the_file(capfd: pytest.CaptureFixture[str], error_file: Path) -> None:
    report(PeerLost("gone"), quiet=True)
    assert capfd.readouterr() == ("", "")
    assert error_file.exists()


def test_our_own_fault_keeps_its_traceback(error_file: Path) -> None:
    try:
        raise ZeroDivisionError("by nought")
    except ZeroDivisionError as problem:
        report(problem)
    text = summary(error_file)
    assert "Traceback (most recent call last)" in text and "ZeroDivisionError: by nought" in text


def test_an_error_file_that_cannot_be_written_is_no_second_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    report(UsageError("the cause"))
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("error: the cause")
    assert "no error file for torchrun: [Errno 2]" in second
