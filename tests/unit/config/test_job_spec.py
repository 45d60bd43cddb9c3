"""What drivers and ranks are told travels as JSON, and the key file is checked."""

import json
from pathlib import Path

import pytest

from spmd_serve.config.job_spec import JobSpec, leave_steps_to_the_watcher, read_key
from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Layout, RankInfo


def spec(key_file: str | None = None) -> JobSpec:
    ranks = tuple(
        RankInfo(rank, rank, 0, "node0", "10.0.0.1", "eth0", 7, rank, "m", f"cuda:{rank}", "0-3")
        for rank in range(4)
    )
    return JobSpec(
        backend="auto",
        lb="internal",
        store_host="10.0.0.1",
        store_port=29500,
        round_id="0123456789ab",
        cluster=Cluster(ranks),
        layout=Layout(tp=2, pp=1, dp=2),
        watcher="@spmd-serve-x",
        key_file=key_file,
        allow_classes=("a:B", "c.d:E.F"),
        heartbeat_s=2.0,
        join_timeout_s=300.0,
        step_timeout_s=300.0,
    )


def test_it_survives_json() -> None:
    assert JobSpec.from_json(json.loads(json.dumps(spec().to_json()))) == spec()


def test_vllms_own_limit_on_a_step_is_a_last_resort_or_the_users() -> None:
    for given, left in (({}, "3000"), ({"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20"}, "20")):
        leave_steps_to_the_watcher(spec(), given)
        assert given == {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": left}


def test_without_a_key_file_there_is_no_key() -> None:
    assert spec().key() is None


def test_a_key_is_the_files_content_without_its_newline(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"secret\n")
    assert spec(str(path)).key() == b"secret"


def test_a_missing_key_file_is_named_with_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(UsageError, match=f"--control-key-file {path} cannot be read: No such file"):
        read_key(str(path))


def test_an_empty_key_file_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b" \n")
    with pytest.raises(UsageError, match=r"is empty: write a secret into it \(head -c 32 /dev/urandom\)"):
        read_key(str(path))
