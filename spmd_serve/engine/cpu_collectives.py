"""Two collective operations of coupled (MoE) replicas that vLLM 0.32 implements for GPUs only."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def complete_cpu_communicator() -> None:
    """Add both operations to vLLM's CPU communicator; MoE models with DP > 1 need them on CPUs."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for method in (all_gatherv, reduce_scatterv):
        if method.__name__ not in vars(CpuCommunicator):
            setattr(CpuCommunicator, method.__name__, method)


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Return the rows of all ranks, in rank order: `sizes` rows from each (default: as many as this rank)."""
    assert dim == 0, "vLLM gathers tokens, which are rows"
    if isinstance(input_, torch.Tensor):
        return _gather(self.device_group, input_, sizes or [input_.shape[0]] * self.world_size)
    return [all_gatherv(self, one, dim, sizes) for one in input_]


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's `sizes` rows of the sum over all ranks (default: equal parts)."""
    assert dim == 0, "vLLM scatters tokens, which are rows"
    total = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=self.device_group)
    if sizes is None:
        sizes = [total.shape[0] // self.world_size] * self.world_size
    part: torch.Tensor = torch.split(total, list(sizes))[self.rank_in_group]
    return part


def _gather(group: Any, mine: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    # gloo gathers only tensors of one shape, so shorter ones are padded.
    padded = mine.new_zeros((max(sizes), *mine.shape[1:]))
    padded[: mine.shape[0]] = mine
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
