"""What every test gets: tiny models, stock vLLM's answers, and a look for processes left over."""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import processes
from harness.models import make_lora, make_model
from harness.server import Server
from harness.waiting import NOTE_PROPERTY, Note
from tests.support import netns, stock
from tests.support.etcd import etcd_server, why_not

PR_SET_CHILD_SUBREAPER = 36
LEFT_OVER_DEADLINE_S = 10.0
TESTS = Path(__file__).parent

# Taken away, for torch and transformers do otherwise under CI, and users do not run there. The workers of
# pytest-xdist inherit what is left, so that they need a name of ours.
if os.environ.pop("CI", None):
    os.environ["TESTS_MUST_SIMULATE_HOSTS"] = "1"
MUST_SIMULATE_HOSTS = "TESTS_MUST_SIMULATE_HOSTS" in os.environ

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# torch asks DNS for the name of each address that a store connects from or to; a lost answer costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fails the run where a test leaves a process behind, and ends it.

    Orphans come to this process instead of init, so that those whose parent died are found too.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(processes.descendants(os.getpid()))
    yield
    new = [process for process in processes.descendants(os.getpid()) if process not in before]
    left = [process for process in new if not processes.is_tracker(process)]
    processes.assert_gone(left, LEFT_OVER_DEADLINE_S)


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Keeps a line for the end of the run; a worker of pytest-xdist has nowhere to print it."""
    return lambda line: record_property(NOTE_PROPERTY, line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, which is its folder; put files with slow tests first.

    Slow files come first so that no worker is left alone with one at the end.
    """
    for item in items:
        if item.path.is_relative_to(TESTS):  # a test of this file runs tests from another folder
            item.add_marker(item.path.relative_to(TESTS).parts[0])
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests have noted."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    lines = [
        f"{report.nodeid}: {line}"
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, line in report.user_properties
        if name == NOTE_PROPERTY
    ]
    if lines:
        terminalreporter.section("seen")
        terminalreporter.write("\n".join([*sorted(lines), ""]))


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
    """Stock vLLM's greedy answers, computed once for all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return stock.Reference(shared / "reference")


@pytest.fixture(scope="session")
def can_simulate_hosts() -> None:
    """Skips where hosts can't be simulated; in CI that is a failure, for there they must be."""
    if reason := netns.why_not():
        if MUST_SIMULATE_HOSTS:
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    if reason := why_not():
        pytest.skip(reason)
    with etcd_server(tmp_path / "etcd") as server:
        yield server
