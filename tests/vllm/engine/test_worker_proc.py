"""A rank's worker: its device, groups and steps. GPU placement is checked as arithmetic and calls."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_serve.channel.base import WorkerCall
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.topology import Cluster, Layout, RankInfo

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def spec(layout: Layout, ranks_per_node: int, round_id: str = "0123456789ab") -> JobSpec:
    ranks = tuple(
        RankInfo(
            rank=rank,
            local_rank=rank % ranks_per_node,
            node=rank // ranks_per_node,
            hostname=f"node{rank // ranks_per_node}",
            address="10.0.0.1",
            interface="eth0",
            pid=1,
            torchrun_rank=rank,
            machine_id="m",
            device="cuda:0",
        )
        for rank in range(layout.world_size)
    )
    return JobSpec(
        "auto", "internal", "h", 1, round_id, Cluster(ranks), layout, "@w", None, (), 2.0, 60.0, 300.0
    )


class ParallelConfig:
    """The fields of vLLM's ParallelConfig that `place_config` sets."""

    def __init__(self, layout: Layout) -> None:
        self.tensor_parallel_size = layout.tp
        self.pipeline_parallel_size = layout.pp
        self.data_parallel_size = layout.dp
        self.data_parallel_rank = 0
        self.data_parallel_index = 0
        self.data_parallel_rank_local: int | None = None
        self.distributed_timeout_seconds = None
        self.independent = False

    def reconfigure_for_independent_dp_rank(self) -> None:
        self.data_parallel_size = 1
        self.data_parallel_rank = 0
        self.independent = True


def config(layout: Layout, *, moe: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=ParallelConfig(layout),
        model_config=SimpleNamespace(is_moe=moe),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9),
        additional_config={},
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a TorchrunWorkerProc passes to vLLM's WorkerProc, which is not started here."""
    from spmd_serve.engine.vllm_compat import WorkerProc

    given: dict[str, Any] = {}

    def init(self: Any, **arguments: Any) -> None:
        given.update(arguments)
        self.worker = SimpleNamespace(
            execute_model=lambda scheduled: scheduled,
            sample_tokens=lambda grammar: f"sampled with {grammar}",
            execute_dummy_batch=lambda: None,
        )

    monkeypatch.setattr(WorkerProc, "__init__", init)
    return given


class Link:
    """A WatcherLink that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.entry = SimpleNamespace(
            step_begin=lambda: self.calls.append("begin"),
            step_end=lambda: self.calls.append("end"),
            turn=lambda: None,
            state=self.calls.append,
        )

    def failed(self, cause: str, *, peer: bool = False) -> None:
        self.calls.append(f"{'peer: ' if peer else ''}{cause}")


def shard(given: dict[str, Any], layout: Layout, ranks_per_node: int, rank: int, link: Link) -> Any:
    from spmd_serve.engine.worker_proc import TorchrunWorkerProc

    job = spec(layout, ranks_per_node)
    store: Any = None
    watcher_link: Any = link
    return TorchrunWorkerProc(config(layout), job, job.cluster.ranks[rank], store, watcher_link)


LAYOUTS = [
    pytest.param(Layout(tp=2, pp=2, dp=1), 2, id="one replica over two nodes"),
    pytest.param(Layout(tp=2, pp=1, dp=4), 4, id="two replicas a node"),
    pytest.param(Layout(tp=2, pp=2, dp=2), 4, id="one replica a node"),
    pytest.param(Layout(tp=2, pp=2, dp=2), 2, id="two replicas, each over two nodes"),
    pytest.param(Layout(tp=2, pp=1, dp=3), 3, id="a replica that straddles two nodes"),
    pytest.param(Layout(tp=1, pp=1, dp=4), 4, id="replicas of one rank"),
    pytest.param(Layout(tp=8, pp=1, dp=1), 8, id="one node, one replica"),
]


@pytest.mark.parametrize(("layout", "ranks_per_node"), LAYOUTS)
@pytest.mark.parametrize("moe", [False, True])
def test_the_device_of_a_rank_is_torchruns_local_rank(
    layout: Layout, ranks_per_node: int, moe: bool, made: dict[str, Any]
) -> None:
    from spmd_serve.engine.worker_proc import place_config

    job = spec(layout, ranks_per_node)
    for info in job.cluster.ranks:
        placed = config(layout, moe=moe)
        place_config(placed, job, info)
        shard(made, layout, ranks_per_node, info.rank, Link())
        parallel = placed.parallel_config
        # as in gpu_worker.init_device, see below
        device = made["local_rank"] + parallel.data_parallel_rank_local * layout.tp * layout.pp
        assert device == info.local_rank
        assert parallel.data_parallel_index == layout.replica(info.rank)


def test_vllm_computes_the_device_that_way() -> None:
    found = importlib.util.find_spec("vllm.v1.worker.gpu_worker")
    assert found is not None and found.origin is not None
    text = Path(found.origin).read_text()
    assert "dp_local_rank = self.parallel_config.data_parallel_rank_local" in text
    assert "self.local_rank += dp_local_rank * tp_pcp_pp_world_size" in text


def test_dense_replicas_have_own_groups_and_moe_replicas_share_one() -> None:
    from spmd_serve.engine.worker_proc import place_config

    layout = Layout(tp=2, pp=1, dp=2)
    job = spec(layout, 4)
    dense, moe, single = config(layout), config(layout, moe=True), config(Layout(tp=4, pp=1, dp=1))
    place_config(dense, job, job.cluster.ranks[3])
    assert dense.parallel_config.independent and dense.parallel_config.data_parallel_size == 1
    place_config(moe, job, job.cluster.ranks[3])
    assert not moe.parallel_config.independent
    assert (moe.parallel_config.data_parallel_size, moe.parallel_config.data_parallel_rank) == (2, 1)
    place_config(single, spec(Layout(tp=4, pp=1, dp=1), 4), job.cluster.ranks[3])
    assert not single.parallel_config.independent


@pytest.mark.parametrize(
    ("on_cpus", "given", "part"), [(True, None, 0.225), (True, 5, 0.9), (False, None, 0.9)]
)
def test_cpu_ranks_of_one_machine_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, on_cpus: bool, given: int | None, part: float
) -> None:
    from vllm.platforms import current_platform

    from spmd_serve.engine.worker_proc import place_config

    monkeypatch.setattr(current_platform, "is_cpu", lambda: on_cpus)
    layout = Layout(tp=4, pp=1, dp=1)
    placed = config(layout)
    placed.cache_config.kv_cache_memory_bytes = given
    job = spec(layout, 4)
    place_config(placed, job, job.cluster.ranks[1])
    assert placed.cache_config.gpu_memory_utilization == part


def test_ranks_are_numbered_inside_their_replica(made: dict[str, Any]) -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    numbers, drivers = [], []
    for rank in range(8):
        shard(made, layout, 4, rank, Link())
        numbers.append(made["rank"])
        drivers.append(made["is_driver_worker"])
    assert numbers == [0, 1, 2, 3] * 2
    assert drivers == [True, False] * 4  # the first TP rank of each stage


def test_shared_memory_names_differ_by_replica_round_and_machine(made: dict[str, Any]) -> None:
    from spmd_serve.engine.worker_proc import shm_name

    layout = Layout(tp=2, pp=1, dp=2)
    ranks = spec(layout, 4).cluster.ranks
    names = [shm_name(spec(layout, 4), me) for me in ranks]
    assert names[0] == names[1] != names[2] == names[3]
    assert shm_name(spec(layout, 4, "ba9876543210"), ranks[0]) not in names
    assert shm_name(spec(layout, 4), replace(ranks[0], machine_id="another")) not in names
    for name in names:  # vLLM's CPU worker takes the part behind the last colon into a path of /dev/shm
        assert name.rpartition(":")[2].isalnum()
    shard(made, layout, 4, 3, Link())
    assert made["distributed_init_method"] == names[3]


def platform(backend: str, *, cuda: bool) -> Any:
    return SimpleNamespace(
        dist_backend=backend,
        is_cuda_alike=lambda: cuda,
        logical_device_id_to_visible_device_id=lambda number: number + 10,
    )


@pytest.mark.parametrize(
    ("backend", "cuda", "split", "group", "device"),
    [
        ("gloo", False, "0", "gloo", None),
        ("gloo", False, "1", "gloo", None),
        ("nccl", True, "0", "nccl", None),
        ("nccl", True, "1", "cpu:gloo,cuda:nccl", "cuda:13"),
        ("xccl", False, "1", "xccl", None),
    ],
)
def test_backend_and_device_of_the_default_group(
    backend: str, cuda: bool, split: str, group: str, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmd_serve.engine import worker_proc as module

    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", split)
    monkeypatch.setattr(module, "current_platform", platform(backend, cuda=cuda))
    assert module.world_backend() == group
    found = module.world_device(3)
    assert (None if found is None else str(found)) == device


@pytest.mark.parametrize(("moe", "rank", "size"), [(False, 1, 2), (True, 3, 4)])
def test_the_default_group_is_one_replica_or_all_ranks(
    moe: bool, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from spmd_serve.engine import worker_proc as module

    given: dict[str, Any] = {}
    monkeypatch.setattr("torch.distributed.init_process_group", lambda **arguments: given.update(arguments))
    layout = Layout(tp=2, pp=1, dp=2)
    job = spec(layout, 4)
    placed = config(layout, moe=moe)
    module.place_config(placed, job, job.cluster.ranks[3])
    module.open_world(placed, HashStore(), job, job.cluster.ranks[3])
    assert (given["rank"], given["world_size"]) == (rank, size)


class TestSteps:
    """The handling of vLLM's worker methods."""

    LAYOUT = Layout(tp=1, pp=1, dp=1)

    def test_one_message_runs_and_samples(self, made: dict[str, Any]) -> None:
        link = Link()
        step = shard(made, self.LAYOUT, 1, 0, link).worker.execute_and_sample
        assert step(None) == "sampled with None"  # execute_model leaves the output to sample_tokens
        assert step("an output") == "an output"  # another stage of the pipeline, or nothing was scheduled
        assert link.calls == []

    def test_a_failed_step_is_reported_to_the_watcher_and_raised(self, made: dict[str, Any]) -> None:
        link = Link()
        built = shard(made, self.LAYOUT, 1, 0, link)

        def fail(scheduled: object) -> None:
            raise RuntimeError("out of\n  memory")

        built.worker.wrapped.execute_model = fail
        with pytest.raises(RuntimeError, match="out of"):
            built.worker.execute_and_sample(None)
        assert link.calls == ["execute_and_sample failed: RuntimeError: out of memory"]

    def test_a_lost_peer_is_reported_as_a_consequence(self, made: dict[str, Any]) -> None:
        link = Link()
        built = shard(made, self.LAYOUT, 1, 0, link)

        def fail(scheduled: object) -> None:
            raise RuntimeError("Connection closed by peer [10.0.0.2]:4711")

        built.worker.wrapped.execute_model = fail
        with pytest.raises(RuntimeError):
            built.worker.execute_and_sample(None)
        assert link.calls[0].startswith("peer: execute_and_sample failed: ")

    def test_steps_are_counted_after_loading(
        self, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from spmd_serve.engine.vllm_compat import WorkerProc
        from spmd_serve.engine.worker_proc import LAST_OF_LOADING

        link = Link()
        built = shard(made, self.LAYOUT, 1, 0, link)
        monkeypatch.setattr(WorkerProc, "_execute_worker_rpc", lambda self, request: link.calls.append("run"))
        for method in ("determine_available_memory", LAST_OF_LOADING, "execute_model"):
            built._execute_worker_rpc(WorkerCall(method, (), {}, None))
        assert link.calls == ["run", "run", "ready", "begin", "run", "end"]
