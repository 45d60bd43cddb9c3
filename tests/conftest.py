"""What every test gets: tiny models, stock vLLM's answers, and a look for processes left over."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import netns, processes, stock
from tests.support.models import make_lora, make_model
from tests.support.waiting import Note

PR_SET_CHILD_SUBREAPER = 36
LEFT_OVER_DEADLINE_S = 10.0

MUST_SIMULATE_HOSTS = bool(os.environ.pop("CI", None))
"""Popped, for torch and transformers do otherwise under CI, and users do not run there."""

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fails the run where a test leaves a process behind, and ends it.

    Orphans come to this process instead of init, so that those whose parent died are found too.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(processes.descendants(os.getpid()))
    yield
    new = [process for process in processes.descendants(os.getpid()) if process not in before]
    left = [process for process in new if "multiprocessing.resource_tracker" not in process.command]
    processes.assert_gone(left, LEFT_OVER_DEADLINE_S)


@pytest.fixture
def note(capsys: pytest.CaptureFixture[str]) -> Note:
    """Prints a line past pytest's capture."""

    def write(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    return write


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="session")
def tiny_lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lora(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> stock.Reference:
    """Stock vLLM's greedy answers."""
    return stock.Reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def can_simulate_hosts() -> None:
    """Skips where hosts can't be simulated; in CI that is a failure, for there they must be."""
    if reason := netns.why_not():
        if MUST_SIMULATE_HOSTS:
            pytest.fail(reason)
        pytest.skip(reason)
