"""vLLM 0.32 lacks all_gatherv and reduce_scatterv on CPUs; experts that span replicas need them."""

from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Give them to vLLM's CPU communicator, in this process."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(tensors, list):
        return [all_gatherv(self, one, dim, sizes) for one in tensors]
    assert dim == 0
    counts = sizes or [tensors.shape[0]] * self.world_size
    parts = [tensors.new_empty((count, *tensors.shape[1:])) for count in counts]
    parts[self.rank_in_group].copy_(tensors)
    for part, source in zip(parts, self.ranks, strict=True):
        dist.broadcast(part, source, group=self.device_group)
    return torch.cat(parts)


def reduce_scatterv(self: Any, tensor: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> Any:
    assert dim == 0
    whole = tensor.clone()
    dist.all_reduce(whole, group=self.device_group)
    counts = sizes or [tensor.shape[0] // self.world_size] * self.world_size
    start = sum(counts[: self.rank_in_group])
    return whole[start : start + counts[self.rank_in_group]].clone()
