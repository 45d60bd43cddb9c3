"""Replicas of a mixture-of-experts model run the model together: its expert layers span all of them.

So before every step the ranks that drive agree that somebody has work; who has none runs a dummy batch. A
call ends on all of them when nobody has work any more.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = timedelta(days=365)
"""A step takes as long as it takes; who dies or hangs meanwhile is the watcher's business."""


class Lockstep:
    """One for each rank; those that drive give it their engine."""

    def __init__(self, drivers: Sequence[int]) -> None:
        """Every rank calls this at the same time: it makes a process group of `drivers`."""
        self._group = dist.new_group(list(drivers), backend="gloo", timeout=_PATIENCE)
        self._engine: Any = None

    def drive(self, engine: Any) -> None:
        """Have vLLM's engine wait for the others before each step; its executor counts `forward_passes`."""
        self._engine = engine
        step = engine.step

        def step_together() -> Any:
            self._anybody_busy(True)
            before = engine.model_executor.forward_passes
            outputs = step()
            if engine.model_executor.forward_passes == before:  # nothing could be scheduled
                engine.model_executor.execute_dummy_batch()
            return outputs

        engine.step = step_together

    def keep_up(self) -> None:
        """On a rank that drives, when its part of a call is done: until all others' parts are."""
        while self._anybody_busy(False):
            self._engine.model_executor.execute_dummy_batch()

    def _anybody_busy(self, busy: bool) -> bool:
        flag = torch.tensor([busy], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())
