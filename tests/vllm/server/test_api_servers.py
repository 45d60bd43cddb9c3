"""Each of several API servers ends normally on a SIGTERM, also while it loads."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from types import SimpleNamespace
from unittest import mock

import pytest

from spmd_serve.config.job_spec import ADDITIONAL_CONFIG_KEY, JobSpec
from spmd_serve.liveness import WatcherLink
from spmd_serve.server.api import serve_as_one_of_several

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TIMEOUT_S = 20.0


def load_forever(pipe: Connection) -> None:
    link = mock.Mock()
    link.leaving.side_effect = lambda: pipe.send("leaving")
    spec = mock.Mock(watcher="@none", join_timeout_s=1.0)
    args = SimpleNamespace(additional_config={ADDITIONAL_CONFIG_KEY: {"first_replica": 0}})

    def run(*_args: object, **_flags: object) -> None:
        pipe.send("loading")
        while True:
            signal.pause()

    with (
        mock.patch.object(WatcherLink, "connect", return_value=link),
        mock.patch.object(JobSpec, "from_json", return_value=spec),
        mock.patch("vllm.v1.utils.run_api_server_worker_proc", run),
    ):
        serve_as_one_of_several("", None, args, {"client_index": 1})  # type: ignore[arg-type]


def test_one_that_still_loads_ends_normally() -> None:
    """Another may serve already, so that the job drains: the end of this one must not count as a failure."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=load_forever, args=(theirs,))
    process.start()
    try:
        assert process.pid is not None
        assert ours.poll(3 * TIMEOUT_S) and ours.recv() == "loading"
        os.kill(process.pid, signal.SIGTERM)
        assert ours.poll(TIMEOUT_S) and ours.recv() == "leaving"
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
