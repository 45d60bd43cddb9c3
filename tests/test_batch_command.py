"""What a finished batch ends with, as torchrun can see it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_serve.batch import BatchOptions
from spmd_serve.batch_command import exit_code
from spmd_serve.errors import ExitCode

OPTIONS = BatchOptions(input_file="in.jsonl", output_file="out.jsonl")


def job(restarts: int, most: int, said: list[str]) -> Any:
    return SimpleNamespace(env=SimpleNamespace(restart_count=restarts, max_restarts=most), say=said.append)


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.FAILED])
def test_other_codes_stay(code: ExitCode) -> None:
    said: list[str] = []
    assert exit_code(job(0, 3, said), OPTIONS, code) == code
    assert said == []


def test_failed_lines_have_a_code_and_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    said: list[str] = []
    assert exit_code(job(3, 3, said), OPTIONS, ExitCode.LINES_FAILED) == ExitCode.LINES_FAILED
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == "all lines are in out.jsonl, some of them with an error"
    assert said == []


def test_failed_lines_are_no_reason_to_start_again() -> None:
    said: list[str] = []
    assert exit_code(job(2, 3, said), OPTIONS, ExitCode.LINES_FAILED) == ExitCode.OK
    assert "torchrun would start the finished run again" in said[0]
