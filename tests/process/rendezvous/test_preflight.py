"""What differs between ranks is found, named and told to all of them."""

import enum
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_serve.errors import SpmdError
from spmd_serve.rendezvous.join import connect_store, wait_keys
from spmd_serve.rendezvous.preflight import Fingerprint, agree, collect, differences
from spmd_serve.topology import Cluster, RankInfo
from tests.support.forked import Children, store_server

HOSTS = {0: "node0", 1: "node0", 2: "node1", 3: "node1"}


def prints(*items: dict[str, str]) -> dict[int, Fingerprint]:
    return {rank: Fingerprint(item) for rank, item in enumerate(items)}


def flags(**values: object) -> dict[str, str]:
    found = collect(values, {}, None).items
    return {key: value for key, value in found.items() if key.startswith("flag ")}


def test_equal_ranks_agree() -> None:
    fingerprint = collect({"dtype": "float32"}, {"VLLM_X": "1"}, None)
    assert differences(dict.fromkeys(range(4), fingerprint), HOSTS) is None


def test_a_difference_names_flag_values_hosts_and_ranks() -> None:
    short, long = {"flag --max-model-len": "1024"}, {"flag --max-model-len": "2048"}
    assert differences(prints(short, short, long, long), HOSTS) == (
        "--max-model-len differs: 1024 on node0 (ranks 0-1), 2048 on node1 (ranks 2-3)"
    )
    assert differences(prints(short, short, {}, {}), HOSTS) == (
        "--max-model-len differs: 1024 on node0 (ranks 0-1), not set on node1 (ranks 2-3)"
    )
    assert differences(prints(short, long, short, short), HOSTS) == (
        "--max-model-len differs: 1024 on node0 (rank 0) and node1 (ranks 2-3), 2048 on node0 (rank 1)"
    )


def test_many_differences_and_many_hosts_stay_one_line() -> None:
    one = {f"env V{number}": "a" for number in range(9)}
    two = {f"env V{number}": "b" for number in range(9)}
    hosts = {rank: f"node{rank}" for rank in range(50)}
    text = differences(prints(*([one] * 49), two), hosts)
    assert text is not None and "\n" not in text
    assert text.startswith(
        "V0 differs: a on node0 (rank 0) and node1 (rank 1) and node2 (rank 2) and 46 more hosts, b on node49"
    )
    assert text.endswith("; and 6 more")
    assert text.count("differs") == 3


def test_hashes_and_long_values_are_shortened() -> None:
    digest = "sha256:" + "ab" * 32
    text = differences(
        prints({"model config.json": digest, "flag --x": "y" * 300}, {"model config.json": "z"}), HOSTS
    )
    assert text is not None
    assert "model config.json differs: abababababab on node0 (rank 0), z on" in text
    assert "y" * 61 not in text and len(text) < 300


def model(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w")
    return str(folder)


def test_weights_that_are_missing_on_one_node(tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    there = collect({}, {}, path)
    (tmp_path / "m" / "model.safetensors").unlink()
    without = collect({}, {}, path)
    (tmp_path / "m" / "config.json").unlink()
    (tmp_path / "m").rmdir()
    missing = collect({}, {}, path)
    assert differences({0: there, 1: there, 2: without, 3: without}, HOSTS) == (
        f"model directory {path} has no weight files on node1 (ranks 2-3)"
    )
    assert differences({0: missing, 1: missing, 2: there, 3: there}, HOSTS) == (
        f"model directory {path} does not exist on node0 (ranks 0-1)"
    )
    assert differences({0: without, 1: without}, HOSTS) is None  # --load-format dummy needs none


def test_a_hub_model_that_one_host_has_yet_to_fetch_is_no_difference() -> None:
    old, new, none = {"model revision": "1"}, {"model revision": "2"}, {"x": "y"}
    assert differences(prints(old | none, none), HOSTS) is None
    text = differences(prints(old, new, {}), HOSTS)
    assert text == "model revision differs: 1 on node0 (rank 0), 2 on node0 (rank 1)"


def test_versions_are_told_without_importing() -> None:
    items = collect({}, {}, None).items
    assert items["torch version"].startswith("2.")
    assert items["vllm version"] != "not installed"
    assert items["Python version"].startswith("3.")
    assert "spmd_serve version" in items


def test_the_environment_that_matters() -> None:
    environ = {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "NCCL_ALGO": "Ring",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_CACHE_ROOT": "/scratch/1",
        "VLLM_CONFIG_ROOT": "/scratch/1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
        "HF_HUB_OFFLINE": "1",
        "RANK": "1",
    }
    found = {key for key in collect({}, environ, None).items if key.startswith("env ")}
    assert found == {"env VLLM_USE_V2_MODEL_RUNNER", "env NCCL_ALGO", "env TORCH_COMPILE_DISABLE"}


def test_secrets_do_not_travel() -> None:
    given = {"api_key": ["s3cret"], "--hf-token": "s3cret", "max_num_batched_tokens": 512}
    items = collect(given, {"VLLM_API_KEY": "s3cret"}, None).items
    assert "s3cret" not in json.dumps(items)
    assert items["flag --api-key"].startswith("sha256:")
    assert items["flag --hf-token"].startswith("sha256:")
    assert items["env VLLM_API_KEY"].startswith("sha256:")
    assert items["flag --max-num-batched-tokens"] == "512"
    assert collect({"api_key": ["other"]}, {}, None).items["flag --api-key"] != items["flag --api-key"]


class Colour(enum.Enum):
    RED = 1


@dataclass
class Config:
    colour: Colour
    sizes: set[str]


class Plain:
    pass


def test_values_are_the_same_text_in_every_process() -> None:
    assert flags(a=Config(Colour.RED, {"y", "x"}), b=Plain, c=Plain(), d=None, e=True, f=[1, "2"], g="t") == {
        "flag --a": '{"colour": "RED", "sizes": ["x", "y"]}',
        "flag --b": f'"{__name__}.Plain"',
        "flag --c": f'"{__name__}.Plain"',
        "flag --e": "true",
        "flag --f": '[1, "2"]',
        "flag --g": "t",
    }


def test_flags_that_may_differ() -> None:
    items = collect({"host": "a", "max_model_len": 1}, {}, None, ignore=["--host"]).items
    assert "flag --host" not in items and items["flag --max-model-len"] == "1"


def cluster() -> Cluster:
    return Cluster(
        tuple(
            RankInfo(rank, rank % 2, rank // 2, HOSTS[rank], "10.0.0.1", "eth0", 1, rank, "m", "cpu")
            for rank in range(4)
        )
    )


def rank_process(port: int, rank: int, items: dict[str, str], timeout_s: float) -> Callable[[], Any]:
    def body() -> dict[str, object]:
        store = connect_store("127.0.0.1", port, "round_id", 10.0)
        said: list[str] = []
        started = time.monotonic()
        try:
            agree(store, cluster().ranks[rank], cluster(), Fingerprint(items), timeout_s, said.append)
        except SpmdError as error:
            return {"failed": str(error), "kind": type(error).__name__, "said": said}
        return {"took": time.monotonic() - started}

    return body


def test_ranks_that_agree_go_on() -> None:
    with store_server() as (_, port), Children() as ranks:
        started = [ranks.start(rank_process(port, rank, {"x": "y"}, 20.0)) for rank in range(4)]
        for child in started:
            assert "took" in child.result()


def test_all_ranks_hear_the_same_error() -> None:
    with store_server() as (_, port), Children() as ranks:
        started = [
            ranks.start(rank_process(port, rank, {"flag --dtype": "half" if rank < 2 else "float"}, 20.0))
            for rank in range(4)
        ]
        results = [child.result() for child in started]
        assert {result["kind"] for result in results} == {"UsageError"}
        assert {result["failed"] for result in results} == {
            "--dtype differs: half on node0 (ranks 0-1), float on node1 (ranks 2-3) (every node needs the "
            "same command, environment, software and model files)"
        }


def test_a_rank_that_shows_nothing_is_named_on_all_others() -> None:
    with store_server() as (_, port), Children() as ranks:

        def until_the_others_have() -> None:
            store = connect_store("127.0.0.1", port, "round_id", 10.0)
            wait_keys(store, {f"agree/{rank}": "it" for rank in (1, 3)}, time.monotonic() + 20.0, print)

        started = [ranks.start(rank_process(port, rank, {}, 20.0)) for rank in (3, 1)]
        ranks.start(until_the_others_have).result()
        started.append(ranks.start(rank_process(port, 0, {}, 0.3)))  # it counts the time
        results = [child.result() for child in started]
        assert {result["kind"] for result in results} == {"PeerLost"}
        (text,) = {result["failed"] for result in results}
        assert text.startswith("flags and versions of rank 2 on node1 did not come within ")


def test_a_missing_rank_0_is_named() -> None:
    with store_server() as (_, port), Children() as ranks:
        result = ranks.start(rank_process(port, 3, {}, -2.0)).result()
        assert result["kind"] == "PeerLost"
        assert result["failed"].startswith("the comparison of rank 0 on node0 did not come within ")
