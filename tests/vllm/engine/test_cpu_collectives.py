"""Gather and scatter parts of different sizes over gloo."""

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from spmd_serve.engine.cpu_collectives import all_gatherv, complete_cpu_communicator, reduce_scatterv
from tests.support.forked import Children, store_server

SIZES = [2, 0, 3]


def on_rank(port: int, rank: int) -> dict[str, Any]:
    store = TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(SIZES), timeout=limit)
    me = SimpleNamespace(device_group=dist.group.WORLD, world_size=len(SIZES), rank_in_group=rank)
    rows = torch.full((SIZES[rank], 2), float(rank))
    ids = torch.full((SIZES[rank],), rank, dtype=torch.int32)
    gathered = all_gatherv(me, [rows, ids], 0, SIZES)
    same = all_gatherv(me, torch.tensor([rank]))
    whole = torch.arange(5.0).reshape(5, 1) * (rank + 1)
    scattered = reduce_scatterv(me, whole, 0, SIZES)
    even = reduce_scatterv(me, torch.ones(3, 1), 0)
    return {
        "rows": gathered[0].tolist(),
        "ids": gathered[1].tolist(),
        "same": same.tolist(),
        "scattered": scattered.flatten().tolist(),
        "untouched": whole.flatten().tolist(),
        "even": even.tolist(),
    }


def test_each_rank_gets_all_rows_and_its_part_of_the_sum() -> None:
    with store_server() as (_, port), Children() as children:
        ranks = [children.start(partial(on_rank, port, rank)) for rank in range(len(SIZES))]
        results = [rank.result() for rank in ranks]
    for rank, result in enumerate(results):
        assert result["rows"] == [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
        assert result["ids"] == [0, 0, 2, 2, 2]
        assert result["same"] == [0, 1, 2]
        assert result["scattered"] == [[0.0, 6.0], [], [12.0, 18.0, 24.0]][rank]
        assert result["untouched"] == [row * (rank + 1) for row in range(5)]
        assert result["even"] == [[3.0]]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllms_cpu_communicator_gets_the_missing_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for method in (all_gatherv, reduce_scatterv):
        assert method.__name__ not in vars(CpuCommunicator), "vLLM has its own by now: ours may go"
        monkeypatch.setattr(CpuCommunicator, method.__name__, None, raising=False)
        monkeypatch.delattr(CpuCommunicator, method.__name__)
    complete_cpu_communicator()
    assert vars(CpuCommunicator)["all_gatherv"] is all_gatherv
    assert vars(CpuCommunicator)["reduce_scatterv"] is reduce_scatterv
