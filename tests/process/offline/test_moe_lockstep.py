"""Replicas that run the model together: as many passes on each, whatever each has to do."""

import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from spmd_serve.offline.moe_lockstep import Lockstep
from tests.support.forked import Children, store_server

RANKS, CALLS = 3, 20


class Engine:
    """Steps that run the model, or now and then find nothing to schedule."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.passes: list[str] = []
        self.model_executor = SimpleNamespace(forward_passes=0, execute_dummy_batch=self._dummy)

    def _dummy(self) -> None:
        self.passes.append("dummy")

    def step(self) -> str:
        if self._chance.random() < 0.8:
            self.model_executor.forward_passes += 1
            self.passes.append("step")
        return "outputs"


def replica(rank: int, port: int) -> list[int]:
    """The passes after each call, in which each replica has its own number of steps, often none."""
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    engine: Any = Engine(rank)
    lockstep = Lockstep(range(RANKS))
    lockstep.drive(engine)
    chance = random.Random(100 + rank)
    after = []
    for _ in range(CALLS):
        for _ in range(chance.choice([0, 0, 1, 5])):
            assert engine.step() == "outputs"
        lockstep.keep_up()
        after.append(len(engine.passes))
    return after


@pytest.mark.filterwarnings("ignore")
def test_every_replica_runs_the_model_as_often() -> None:
    with store_server() as (_, port), Children() as children:
        started = [children.start(lambda rank=rank: replica(rank, port)) for rank in range(RANKS)]  # type: ignore[misc]
        first, *others = [child.result() for child in started]
    assert all(other == first for other in others)
    assert first[-1] > CALLS
