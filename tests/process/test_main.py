"""The command line: exit codes, and one line for each mistake of the user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_serve.errors import ExitCode
from spmd_serve.system.network import host_name
from spmd_serve.system.torchrun_env import clean_environ

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the program without torchrun, or with some of torchrun's variables set."""
    return subprocess.run(
        [sys.executable, "-m", "spmd_serve", *arguments],
        cwd=ROOT,
        env={**clean_environ(os.environ), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_version() -> None:
    done = run("--version")
    assert done.returncode == ExitCode.OK
    assert done.stdout.startswith("spmd_serve 0")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["m", "--join-timeout", "0"], "--join-timeout must be above 0 seconds, got 0.0"),
        (["m", "--rank-timeout=-1"], "--rank-timeout must be above 0 seconds, got -1.0"),
        (
            ["m", "--step_timeout", "x"],
            "argument --step-timeout: invalid float value: 'x' (--help lists the flags)",
        ),
        (["m", "--probe-port", "70000"], "--probe-port must be a port number (0 to 65535), got 70000"),
        (
            ["serve", "m", "--control-backend", "ray"],
            "argument --control-backend: invalid choice: 'ray' (choose from 'auto', 'gloo', 'nccl') "
            "(--help lists the flags)",
        ),
    ],
)
def test_a_bad_value_is_one_line(arguments: list[str], line: str) -> None:
    done = run(*arguments)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.splitlines()[-1].replace(", ", " ").replace("'", "") == (
        f"spmd_serve: {host_name()}: error: {line}".replace(", ", " ").replace("'", "")
    )
    assert "Traceback" not in done.stderr


def test_half_of_torchruns_variables_are_a_mistake(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    done = run("m", RANK="3", TORCHELASTIC_ERROR_FILE=str(error_file))
    assert done.returncode == ExitCode.USAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"spmd_serve: rank 3 on {host_name()}: error: LOCAL_RANK is not set, though")
    assert "LOCAL_RANK is not set" in error_file.read_text()


def test_without_vllm_it_says_what_to_install(tmp_path: Path) -> None:
    """A missing extra of the package is reported without a traceback."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = run("m", PYTHONPATH=str(tmp_path))
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.splitlines()[0] == (
        f"spmd_serve: {host_name()}: error: No module named 'torch': install vllm>=0.32,<0.33, "
        "which brings its torch: pip install 'spmd-serve[gpu]' (or [cpu])"
    )
    assert "Traceback" not in done.stderr
