"""The child process with the drivers: its environment, and a SIGTERM at its start."""

import os
import sys
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from unittest import mock

import pytest

from spmd_serve.errors import Stopped
from spmd_serve.job import driver_process
from spmd_serve.job.driver_process import LOADING_TIMEOUT_S, PLUGIN, prepare_environ
from spmd_serve.liveness import End, WatcherLink
from spmd_serve.topology import Layout


@pytest.fixture(autouse=True)
def environ() -> Iterator[None]:
    """Undo changes of the environment."""
    with mock.patch.dict(os.environ, clear=True):
        yield


def install(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    """Simulate that these plugins (name to vLLM's group) are installed, and no others."""

    def entry_points(*, group: str) -> EntryPoints:
        return EntryPoints(
            EntryPoint(name, "module:function", group) for name, known in plugins.items() if known == group
        )

    monkeypatch.setattr(driver_process, "entry_points", entry_points)


def test_torchruns_variables_are_removed() -> None:
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PET_NNODES": "2",
        "OMP_NUM_THREADS": "1",
        "HOME": "/root",
    }
    prepare_environ()
    ours = {"VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "VLLM_PLUGINS"}
    assert set(os.environ) - {"PYTEST_CURRENT_TEST"} == {"HOME", *ours}


def test_loading_may_take_long_unless_the_user_sets_a_limit() -> None:
    prepare_environ()
    assert os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] == str(LOADING_TIMEOUT_S)
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = "60"
    prepare_environ()
    assert os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "60"


def test_our_routes_do_not_switch_off_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        lora_resolver="vllm.general_plugins",
        device="vllm.platform_plugins",
        routes="vllm.endpoint_plugins",  # vLLM loads these only if they are named
    )
    prepare_environ()
    assert os.environ["VLLM_PLUGINS"].split(",") == ["device", "lora_resolver", PLUGIN]


def test_without_other_plugins_ours_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    prepare_environ()
    assert os.environ["VLLM_PLUGINS"] == PLUGIN


def test_the_users_own_list_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lora_resolver="vllm.general_plugins")
    os.environ["VLLM_PLUGINS"] = "theirs"
    prepare_environ()
    assert os.environ["VLLM_PLUGINS"] == f"theirs,{PLUGIN}"
    prepare_environ()
    assert os.environ["VLLM_PLUGINS"] == f"theirs,{PLUGIN}"


def test_our_plugin_is_installed_under_that_name() -> None:
    from importlib.metadata import entry_points

    (ours,) = [item for item in entry_points(group="vllm.endpoint_plugins") if item.name == PLUGIN]
    assert ours.value == "spmd_serve.server.routes:plugin"


def sleep() -> int:
    time.sleep(60)
    return 1


@pytest.mark.parametrize(("stop_error", "code"), [(None, 0), (Stopped("not done"), 4)])
def test_sigterm_right_after_the_start_is_an_orderly_end(
    stop_error: Stopped | None, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even when it comes before the child's first line; a child is asked to drain as soon as it is there."""
    link = mock.Mock(announce_end=lambda end: print(end == End(code=code, unserved=True), file=sys.stderr))
    monkeypatch.setattr(WatcherLink, "connect", lambda *args, **kwargs: link)
    spec = mock.Mock(
        watcher="@none", join_timeout_s=1.0, step_timeout_s=300.0, layout=Layout(dp=1, pp=1, tp=1)
    )
    child = driver_process.DriverChild.start("API server", sleep, spec, False, stop_error=stop_error)
    try:
        child.drain()
        assert child.wait(20.0) == code
    finally:
        child.process.kill()
        child.process.join()
    assert capfd.readouterr().err == ("spmd_serve: not done\n" if code else "") + "True\n"
