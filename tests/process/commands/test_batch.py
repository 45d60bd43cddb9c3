"""What a batch does before and after its lines, and what it ends with, as torchrun can see it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from harness.torchrun import plain_environ, torchrun_command
from spmd_serve.batch import BatchOptions
from spmd_serve.commands.batch import BatchJob, final_exit_code
from spmd_serve.config.flags import Flags
from spmd_serve.errors import ExitCode
from spmd_serve.system.torchrun_env import TorchrunEnv
from tests.support.batch import Engine, Place, backwards
from tests.support.job import ROOT

DEADLINE_S = 60.0
OPTIONS = BatchOptions(input_file="in.jsonl", output_file="out.jsonl")


def job(may_restart: bool, logged: list[str]) -> Any:
    one = BatchJob(Flags(), TorchrunEnv.read({}))
    one.may_restart = may_restart
    one.say = logged.append  # type: ignore[method-assign,assignment]
    return one


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.FAILED])
def test_other_codes_stay(code: ExitCode) -> None:
    logged: list[str] = []
    assert final_exit_code(job(True, logged), OPTIONS, code) == code
    assert logged == []


def test_failed_lines_have_a_code_and_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    logged: list[str] = []
    assert final_exit_code(job(False, logged), OPTIONS, ExitCode.LINES_FAILED) == ExitCode.LINES_FAILED
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == "all lines are in out.jsonl, some of them with an error"
    assert logged == []


def test_failed_lines_do_not_cause_a_restart() -> None:
    logged: list[str] = []
    assert final_exit_code(job(True, logged), OPTIONS, ExitCode.LINES_FAILED) == ExitCode.OK
    assert "torchrun would start the finished run again" in logged[0]


def run_complete(what: str, place: Place, log: Path) -> tuple[int, str]:
    """Two ranks whose lines are all answered (see tests/support/batch_job.py): code, and what was logged."""
    place.put_many(20)
    assert place.run(Engine(backwards)) == ExitCode.OK
    words = [what, str(place.input), str(place.output)]
    command = torchrun_command(2, words, module="tests.support.batch_job")
    with Server(command, log, environ=plain_environ(PYTHONPATH=str(ROOT))) as server:
        return server.wait_exit(DEADLINE_S), server.text()


def test_ranks_wait_for_work_that_takes_longer_than_they_wait_for_each_other(tmp_path: Path) -> None:
    """Reading, comparing, sorting and uploading are rank 0's; the others say what they wait for."""
    place = Place(tmp_path)
    code, text = run_complete("patient", place, tmp_path / "log")
    assert code == 0, text
    assert "rank 0 ends with 0" in text
    assert "rank 1: waiting for the vote on the batch's files of rank 0" in text
    assert "rank 1: waiting for the sorted and uploaded output of rank 0" in text
    assert [line["custom_id"] for line in place.lines()] == [f"id-{number}" for number in range(1, 21)]


@pytest.mark.parametrize("what", ["stop_in_files", "stop_in_sort"])
def test_a_batch_that_is_stopped_outside_of_its_lines_says_so(what: str, tmp_path: Path) -> None:
    code, text = run_complete(what, Place(tmp_path), tmp_path / "log")
    assert code == 1  # torchrun's
    for rank in (0, 1):
        final_exit_code = (
            f"rank {rank}: the batch was stopped before its end: run the same command again to go on"
        )
        assert text.count(final_exit_code) == 1, text
    assert len(re.findall(r"exitcode *: 4 ", text)) == 2, text
    assert "ends with" not in text
