"""The default process group: the script's own where it has one, else one that we make. It is never destroyed

by us while the script runs, though vLLM's shutdown would: the script may go on using it.
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
    """The script's default group, for the comparison between ranks."""
    return f"{dist.get_backend()}, {dist.get_world_size()} ranks" if dist.is_initialized() else "none"


def check_own(me: RankInfo, cluster: Cluster) -> None:
    """Raise UsageError where the script's default group, which vLLM will use, is not torchrun's world."""
    if not dist.is_initialized():
        return
    size, world = dist.get_world_size(), len(cluster.ranks)
    if size != world:
        raise UsageError(
            f"the script's default process group has {size} ranks, but torchrun started {world}: vLLM builds "
            "its groups inside it, so give init_process_group() all ranks, or call it not at all"
        )
    if dist.get_rank() != me.rank:
        raise UsageError(
            f"the script's default process group calls torchrun's rank {me.rank} rank {dist.get_rank()}: "
            "give init_process_group() torchrun's numbers (init_method='env://', the default)"
        )


def ensure(vllm_config: Any, store: TorchStore, me: RankInfo, cluster: Cluster) -> None:
    """Make the default group unless there is one; all ranks are in it, those of all replicas too.

    vLLM builds a replica's groups inside a larger world by itself (its "external data parallel").
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
    """While vLLM cleans up: its order to destroy the default group is not carried out."""
    destroy = dist.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    with mock.patch.object(dist, "destroy_process_group", destroy_others):
        yield
