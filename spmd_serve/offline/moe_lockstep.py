"""Run the replicas of a mixture-of-experts model in lockstep: its expert layers span all replicas.

Before every step the drivers agree that at least one of them has work. A driver without work runs a dummy
batch. A call ends on all drivers when none has work left.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NO_TIMEOUT = timedelta(days=365)
"""The length of a step is not limited here: the watcher detects ranks that die or hang."""


class Lockstep:
    """One object per rank; drivers pass their engine to `drive`."""

    def __init__(self, drivers: Sequence[int]) -> None:
        """Create a process group of `drivers`; every rank calls this at the same time."""
        self._group = dist.new_group(list(drivers), backend="gloo", timeout=_NO_TIMEOUT)
        self._engine: Any = None

    def drive(self, engine: Any) -> None:
        """Make vLLM's engine wait for the others before each step; its executor counts `forward_passes`."""
        self._engine = engine
        step = engine.step

        def step_together() -> Any:
            self._any_busy(True)
            before = engine.model_executor.forward_passes
            outputs = step()
            if engine.model_executor.forward_passes == before:  # nothing could be scheduled
                engine.model_executor.execute_dummy_batch()
            return outputs

        engine.step = step_together

    def keep_up(self) -> None:
        """Run dummy batches until the other drivers have finished their part of the call."""
        while self._any_busy(False):
            self._engine.model_executor.execute_dummy_batch()

    def _any_busy(self, busy: bool) -> bool:
        flag = torch.tensor([busy], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())
