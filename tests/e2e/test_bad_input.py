"""What a person got wrong is one line, said before anything is loaded, with an exit code that is not 0."""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.server import Server
from harness.torchrun import torchrun_command
from tests.support.job import error_lines, first_cause, job_environ
from tests.support.stock import SMALL_FLAGS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMIT_S = 120.0
USAGE = 2  # exit code of a rank; torchrun's own is then 1

WRONG = {
    "an unknown flag": (["--max-model-lenght=512"], "unrecognized arguments: --max-model-lenght=512"),
    "a flag that is torchrun's": (["--nnodes=2"], "--nnodes contradicts torchrun: write torchrun --nnodes"),
    "a backend that needs GPUs": (["--control-backend=nccl"], "--control-backend nccl needs GPUs"),
    "a value that vLLM refuses": (["--max-model-len=99999"], "max_model_len (99999) is greater than"),
}


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def arguments(model: Path, *flags: str) -> list[str]:
    return [str(model), "--host=127.0.0.1", f"--port={free_port()}", *SMALL_FLAGS, *flags]


def alone(tmp_path: Path, words: list[str], **variables: str) -> tuple[int, str]:
    """Runs `python -m spmd_serve WORDS`: the exit code, and the only line of error."""
    command = [sys.executable, "-m", "spmd_serve", *words]
    with Server(command, tmp_path / "log", environ=job_environ(**variables)) as server:
        code = server.wait_exit(LIMIT_S)
        (line,) = error_lines(server)
        assert server.text().rstrip().endswith(line), server.text()
        assert_nothing_was_loaded(server)
        return code, line


def on_ranks(ranks: int, tmp_path: Path, words: list[str]) -> str:
    """Run it under torchrun; return the common message of the ranks and the end of torchrun's output."""
    with Server(torchrun_command(ranks, words), tmp_path / "log", environ=job_environ()) as server:
        assert server.wait_exit(LIMIT_S) not in (0, -signal.SIGKILL)
        said = error_lines(server)
        # As soon as one rank has ended, torchrun ends those that have not yet said it.
        assert 1 <= len(said) <= ranks and len(set(said)) == 1, server.text()
        assert said[0] in first_cause(server)
        assert_nothing_was_loaded(server)
        return said[0]


def assert_nothing_was_loaded(server: Server) -> None:
    assert "Loading" not in server.text() and "ready after" not in server.text()


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_flag(what: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    flags, expected = WRONG[what]
    words = arguments(tiny_qwen3, *flags)
    code, line = alone(tmp_path, words)
    assert code == USAGE and expected in line


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    code, line = alone(tmp_path, arguments(tmp_path / "nowhere"))
    assert code == USAGE and str(tmp_path / "nowhere") in line and os.uname().nodename in line


def test_a_model_without_weights(tiny_qwen3: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(tiny_qwen3, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    code, line = alone(tmp_path, arguments(bare))
    assert code == USAGE and str(bare) in line and "has no weight files" in line


def test_a_port_that_is_taken(tiny_qwen3: Path, taken_port: int, tmp_path: Path) -> None:
    line = on_ranks(2, tmp_path, [*arguments(tiny_qwen3), f"--port={taken_port}"])
    assert f"--port {taken_port} is taken" in line


def test_sizes_that_are_not_the_world(tiny_qwen3: Path, tmp_path: Path) -> None:
    line = on_ranks(3, tmp_path, arguments(tiny_qwen3, "-tp=2"))
    assert "--tensor-parallel-size 2" in line and "torchrun started 3 ranks" in line


def test_heads_that_cannot_be_shared(tiny_qwen3: Path, tmp_path: Path) -> None:
    line = on_ranks(3, tmp_path, arguments(tiny_qwen3))
    assert "attention heads (8) must be divisible by tensor parallel size (3)" in line


def test_a_master_that_nobody_reaches(tiny_qwen3: Path, tmp_path: Path) -> None:
    """The ranks' variables set by hand, as some launchers do."""
    port = free_port()
    variables = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    code, line = alone(tmp_path, arguments(tiny_qwen3, "--join-timeout=4"), **variables)
    assert code != 0 and f"127.0.0.1:{port}" in line
