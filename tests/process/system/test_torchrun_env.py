"""torchrun's endpoint, read from a real process."""

import subprocess
import sys

from spmd_serve.system.torchrun_env import (
    rendezvous_host,
)

RANK_3 = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}


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
