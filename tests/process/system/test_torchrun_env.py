"""torchrun's endpoint, read from real processes."""

import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from spmd_serve.system.torchrun_env import rendezvous_host

PROGRAM = (
    "import os; from spmd_serve.system.torchrun_env import node_range, rendezvous_host; "
    "pid = os.getppid(); print('rank', rendezvous_host(pid), node_range(pid), flush=True)"
)
RANK = [sys.executable, "-c", PROGRAM]
WRAPPED_RANK = ["bash", "-c", f"{shlex.join(RANK)}; true"]


def agent(rank: list[str]) -> list[str]:
    module = [sys.executable, "-m", "torch.distributed.run"]
    options = ["--nnodes=1:1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [*module, *options, "--no-python", *rank]


def shell(command: list[str]) -> list[str]:
    # The second command keeps bash from replacing itself with the first.
    return ["bash", "-c", f"{shlex.join(command)}; exit $?"]


def test_the_endpoint_of_a_real_process() -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program, "torchrun", "--rdzv-endpoint", "head:1", "--", "x"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert rendezvous_host(process.pid) == "head"
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("start", "rank"),
    [(list, RANK), (shell, RANK), (list, WRAPPED_RANK)],
    ids=["the agent is process 1", "a shell is process 1", "a wrapper below process 1"],
)
def test_torchrun_in_a_pid_namespace(start: Callable[[list[str]], list[str]], rank: list[str]) -> None:
    # --kill-child: a timeout ends process 1, and with it the whole namespace.
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    try:
        trial = subprocess.run([*namespace, "true"], capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if trial.returncode != 0:
        pytest.skip(f"PID namespaces are not permitted here: {trial.stderr.strip()}")
    result = subprocess.run(
        [*namespace, *start(agent(rank))], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "rank localhost (1, 1)" in result.stdout.splitlines()
