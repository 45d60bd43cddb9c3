"""Use the script's default process group, or create one.

The group is kept while the script runs, although vLLM's shutdown would destroy it: the script may use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from spmd_serve.engine.worker_proc import world_backend, world_device
from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, RankInfo


def describe_own() -> str:
    """Return a description of the script's default group, for the comparison between ranks."""
    return f"{dist.get_backend()}, {dist.get_world_size()} ranks" if dist.is_initialized() else "none"


def check_own(me: RankInfo, cluster: Cluster) -> None:
    """Raise UsageError if the script's default group does not have torchrun's ranks and numbers."""
    if not dist.is_initialized():
        return
    size, world = dist.get_world_size(), len(cluster.ranks)
    if size != world:
        raise UsageError(
            f"the script's default process group has {size} ranks, but torchrun started {world}: vLLM builds "
            "its groups inside it, so call init_process_group() with all ranks, or do not call it"
        )
    if dist.get_rank() != me.rank:
        raise UsageError(
            f"the script's default process group calls torchrun's rank {me.rank} rank {dist.get_rank()}: "
            "give init_process_group() torchrun's numbers (init_method='env://', the default)"
        )


def ensure(vllm_config: Any, store: TorchStore, me: RankInfo, cluster: Cluster) -> None:
    """Create the default group, with the ranks of all replicas, unless the script has one.

    vLLM creates the groups of a replica inside a larger group by itself (its "external data parallel").
    """
    if dist.is_initialized():
        return
    seconds = vllm_config.parallel_config.distributed_timeout_seconds
    dist.init_process_group(
        backend=world_backend(),
        store=PrefixStore("world", store),
        rank=me.rank,
        world_size=len(cluster.ranks),
        timeout=timedelta(seconds=seconds) if seconds else None,
        device_id=world_device(me.local_rank),
    )


@contextmanager
def kept() -> Iterator[None]:
    """Keep the default group while vLLM cleans up: ignore calls that would destroy it."""
    destroy = dist.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    with mock.patch.object(dist, "destroy_process_group", destroy_others):
        yield
