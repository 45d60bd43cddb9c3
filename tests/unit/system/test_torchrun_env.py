"""torchrun's variables, and what its agent was told."""

import os
from pathlib import Path

import pytest

from spmd_serve.errors import UsageError
from spmd_serve.system.torchrun_env import (
    TorchrunEnv,
    clean_environ,
    node_range,
    rendezvous_host,
    split_endpoint,
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


def test_what_torchrun_sets_is_read() -> None:
    assert TorchrunEnv.read(RANK_3) == TorchrunEnv(
        rank=3,
        local_rank=1,
        group_rank=1,
        world_size=4,
        local_world_size=2,
        group_world_size=2,
        master_addr="node0",
        master_port=29400,
        run_id="job",
        restart_count=1,
        max_restarts=3,
        agent_pid=os.getppid(),
        launched=True,
        agent_store=True,
    )


def test_without_torchrun_a_world_of_one() -> None:
    env = TorchrunEnv.read({"MASTER_ADDR": "left over", "PATH": "/bin"})
    assert (env.rank, env.world_size, env.launched) == (0, 1, False)
    assert (env.master_addr, env.master_port) == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ],
)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} is not set.*torchrun"):
        TorchrunEnv.read({key: value for key, value in RANK_3.items() if key != name})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "three"}, "RANK='three' is not a whole number"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT='-1' is not a whole number"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 does not fit RANK=3 and GROUP_RANK=1 .*--virtual-local-rank"),
    ],
)
def test_a_wrong_variable_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TorchrunEnv.read(RANK_3 | changes)


def test_nodes_of_different_size_are_not_refused_here() -> None:
    uneven = {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "3"}
    assert TorchrunEnv.read(RANK_3 | uneven).rank == 2


def test_children_get_a_clean_environment() -> None:
    more = {"PET_RDZV_ENDPOINT": "x", "OMP_PLACES": "{0}", "PATH": "/bin", "RANKING": "5", "CUDA_HOME": "/c"}
    assert clean_environ(RANK_3 | more) == {"PATH": "/bin", "RANKING": "5", "CUDA_HOME": "/c"}


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("node0", "node0"),
        ("node0:29400", "node0"),
        (" 10.0.0.1:0", "10.0.0.1"),
        ("[fd00::1]:29400", "fd00::1"),
        ("[fd00::1]", "fd00::1"),
        ("/tmp/store", "/tmp/store"),
    ],
)
def test_hosts_of_endpoints(endpoint: str, host: str) -> None:
    assert split_endpoint(endpoint) == host


def proc_entry(proc: Path, pid: int, words: list[str], environ: dict[str, str], parent: int) -> None:
    entry = proc / str(pid)
    entry.mkdir()
    (entry / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (entry / "environ").write_bytes(b"".join(f"{k}={v}".encode() + b"\0" for k, v in environ.items()))
    (entry / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1 0")


SCRIPT = ["-m", "spmd_serve", "--master-addr", "script", "--rdzv-endpoint", "script"]


@pytest.mark.parametrize(
    ("words", "environ", "host"),
    [
        (["python", "/venv/bin/torchrun", "--nnodes", "2", "--rdzv-endpoint", "head:29400"], {}, "head"),
        (["python", "/venv/bin/torchrun", "--rdzv_endpoint=head:29400"], {}, "head"),
        (["python", "-m", "torch.distributed.run", "--master_addr=head", "--master-port", "1"], {}, "head"),
        (["python", "/x/torch/distributed/run.py", "--rdzv-endpoint=e", "--master-addr=m"], {}, "e"),
        (["torchrun", "--standalone", "--nproc-per-node", "2"], {}, "localhost"),
        (["torchrun", "--no-python"], {"PET_RDZV_ENDPOINT": "head:1"}, "head"),
        (["torchrun", "--nnodes=2"], {"PET_MASTER_ADDR": "head"}, "head"),
        (["torchrun", "--nnodes=2"], {}, None),
    ],
)
def test_the_endpoint_that_torchrun_was_given(
    tmp_path: Path, words: list[str], environ: dict[str, str], host: str | None
) -> None:
    proc_entry(tmp_path, 50, [*words, *SCRIPT], environ, 1)
    assert rendezvous_host(50, tmp_path) == host
    # A wrapper script between the agent and the rank changes nothing.
    proc_entry(tmp_path, 51, ["bash", "-c", "torchrun --rdzv-endpoint=no"], {}, 50)
    assert rendezvous_host(51, tmp_path) == host


@pytest.mark.parametrize(
    ("words", "environ", "nodes"),
    [
        (["torchrun", "--nnodes", "1:4"], {}, (1, 4)),
        (["torchrun", "--nnodes=2"], {"PET_NNODES": "1:4"}, (2, 2)),
        (["torchrun", "--standalone"], {}, (1, 1)),
        (["torchrun", "--no-python"], {"PET_NNODES": "2:3"}, (2, 3)),
        (["torchrun", "--nnodes=many"], {}, None),
        (["bash"], {}, None),
    ],
)
def test_how_many_nodes_torchrun_may_run_the_job_on(
    tmp_path: Path, words: list[str], environ: dict[str, str], nodes: tuple[int, int] | None
) -> None:
    proc_entry(tmp_path, 50, [*words, *SCRIPT], environ, 1)
    assert node_range(50, tmp_path) == nodes


AGENT = ["torchrun", "--nnodes=1:4", "--rdzv-endpoint=head:1"]


@pytest.mark.parametrize(
    "chain",
    [
        [AGENT],
        [["bash", "-c", "torchrun --rdzv-endpoint=no; true"], AGENT],
        [AGENT, ["bash", "wrapper.sh"], ["env", "A=b"]],
    ],
    ids=["the agent is process 1", "a shell is process 1", "a wrapper below process 1"],
)
def test_the_first_process_of_a_container(tmp_path: Path, chain: list[list[str]]) -> None:
    for pid, words in enumerate(chain, 1):
        proc_entry(tmp_path, pid, words, {}, pid - 1)
    assert rendezvous_host(len(chain), tmp_path) == "head"
    assert node_range(len(chain), tmp_path) == (1, 4)


def test_an_init_process_is_no_agent(tmp_path: Path) -> None:
    proc_entry(tmp_path, 1, ["/sbin/init"], {"PET_RDZV_ENDPOINT": "head:1"}, 0)
    assert rendezvous_host(1, tmp_path) is None
    assert node_range(1, tmp_path) is None


def test_no_torchrun_above(tmp_path: Path) -> None:
    proc_entry(tmp_path, 50, ["bash"], {}, 1)
    assert rendezvous_host(50, tmp_path) is None
    assert rendezvous_host(60, tmp_path) is None
