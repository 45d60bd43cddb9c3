"""The classes whose instances may cross the control channel, as names: nothing is imported for the list.

Only data: a class is here because a SchedulerOutput, a worker call or a worker's answer of vLLM holds it.
Two lists, because they are rebuilt in two ways. INSTANCES are made empty (`cls.__new__`) and given their
attributes, so no constructor runs. CONSTRUCTED are called with their values: enums (a look-up) and
msgspec structs, whose `__post_init__` only checks and normalises fields.
Never put here: functions, anything with a `__call__`, `__setstate__`, `append`, `extend`, `add` or
`__setitem__` that does more than store, anything that opens files, imports or runs what it is given.
A name that the installed vLLM does not have is no error: it is simply never sent.
"""

import importlib
from collections.abc import Iterable
from typing import Any

from spmd_serve.errors import SpmdError, UsageError


def _names(module: str, names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names.split())


_KV = "vllm.distributed.kv_transfer.kv_connector.v1"
_EC = "vllm.distributed.ec_transfer.ec_connector"

INSTANCES: tuple[str, ...] = (
    # what the scheduler sends
    *_names(
        "vllm.v1.core.sched.output",
        "SchedulerOutput CachedRequestData NewRequestData ScheduledEncoderInputStats GrammarOutput",
    ),
    *_names("vllm.v1.core.kv_cache_utils", "KVCacheBlockCopy"),
    *_names("vllm.sampling_params", "StructuredOutputsParams RepetitionDetectionParams"),
    *_names(
        "vllm.multimodal.inputs",
        "MultiModalFeatureSpec MultiModalKwargsItem MultiModalKwargsItems MultiModalFieldElem"
        " MultiModalFieldConfig MultiModalBatchedField MultiModalFlatField MultiModalSharedField"
        " PlaceholderRange",
    ),
    *_names("vllm.renderers.chat_utils", "_BatchedSingleItemField"),
    # the KV cache's layout, both ways
    *_names(
        "vllm.v1.kv_cache_interface",
        "KVCacheConfig KVCacheTensor KVCacheGroupSpec KVCacheSpec AttentionSpec FullAttentionSpec"
        " MLAAttentionSpec HiddenStateCacheSpec RSWASpec ChunkedLocalAttentionSpec SlidingWindowSpec"
        " CircularBufferSpec SlidingWindowMLASpec MambaSpec EncoderOnlyAttentionSpec CrossAttentionSpec"
        " SinkFullAttentionSpec UniformTypeKVCacheSpecs HiSparseHotSpec HiSparseResidentSpec",
    ),
    *_names("vllm.v1.attention.backend", "MultipleOf"),
    # what workers answer
    *_names(
        "vllm.v1.outputs",
        "ModelRunnerOutput SamplerOutput LogprobsLists LogprobsTensors SamplingMaskLists DraftTokenIds"
        " KVConnectorOutput ECConnectorOutput",
    ),
    *_names("vllm.compilation.cuda_graph", "CUDAGraphStat"),
    *_names("vllm.v1.worker.worker_base", "CompilationTimes"),
    *_names("vllm.v1.serial_utils", "UtilityResult"),
    # KV, encoder-cache and auxiliary connectors that are part of vLLM
    *_names(
        "vllm.distributed.aux_output_connector.connector",
        "AuxOutputConnectorMetadata AuxRequestOutput PackedBlockHashes",
    ),
    *_names("vllm.distributed.kv_events", "KVEventAggregator"),
    *_names(f"{_KV}.metrics", "KVConnectorStats"),
    *_names(
        f"{_KV}.nixl.metadata", "NixlConnectorMetadata NixlHandshakePayload ReqMeta RemoteMeta HeartbeatInfo"
    ),
    *_names(f"{_KV}.nixl.stats", "NixlKVConnectorStats"),
    *_names(
        f"{_KV}.multi_connector",
        "MultiKVConnectorMetadata MultiKVConnectorWorkerMetadata MultiKVConnectorStats",
    ),
    *_names(
        f"{_KV}.offloading.common",
        "OffloadingConnectorMetadata OffloadingWorkerMetadata TransferJob TransferStats"
        " DirectionalTransferStats",
    ),
    *_names(f"{_KV}.offloading.metrics", "OffloadingConnectorStats"),
    *_names("vllm.v1.kv_offload.base", "GPULoadStoreSpec"),
    *_names("vllm.v1.kv_offload.cpu.common", "CPULoadStoreSpec"),
    *_names("vllm.v1.simple_kv_offload.metadata", "SimpleCPUOffloadMetadata SimpleCPUOffloadWorkerMetadata"),
    *_names("vllm.v1.simple_kv_offload.metrics", "SimpleCPUOffloadStats"),
    *_names(f"{_KV}.mooncake.mooncake_connector", "MooncakeConnectorMetadata PullReqMeta"),
    *_names(f"{_KV}.mooncake.stats", "MooncakeKVConnectorStats"),
    *_names(
        f"{_KV}.mooncake.store.data",
        "MooncakeStoreConnectorMetadata MooncakeStoreWorkerMetadata ReqMeta LoadSpec BoundaryPut"
        " TailKeyBoundary",
    ),
    *_names(f"{_KV}.mooncake.store.metrics", "MooncakeStoreConnectorStats"),
    *_names(f"{_KV}.mooncake.store.connector", "MooncakeStoreKVEvents"),
    *_names(f"{_KV}.moriio.moriio_common", "MoRIIOConnectorMetadata ReqMeta"),
    *_names(
        f"{_KV}.hf3fs.utils.common",
        "HF3FSConnectorMetadata HF3FSRequestMetadata LoadBlockInfo SaveBlockInfo",
    ),
    *_names(f"{_KV}.hf3fs.hf3fs_connector", "HF3FSKVConnectorStats"),
    *_names(f"{_KV}.hisparse.connector", "HiSparseConnectorMetadata HiSparseConnectorWorkerMetadata"),
    *_names(f"{_KV}.hisparse.stats", "HiSparseKVConnectorStats"),
    *_names(
        "vllm.v1.hisparse.types",
        "SparseKVOffloadCommand SparseKVPageTransfer SparseKVRowMirror SparseKVResidencyUpdate",
    ),
    *_names(f"{_KV}.lmcache_connector", "LMCacheKVEvents"),
    *_names(f"{_KV}.decode_bench_connector", "DecodeBenchConnectorMetadata"),
    *_names(f"{_KV}.example_connector", "ExampleConnectorMetadata ReqMeta"),
    *_names(
        f"{_KV}.example_hidden_states_connector",
        "ExampleHiddenStatesConnectorMetadata PendingSave",
    ),
    *_names(f"{_EC}.metrics", "ECConnectorStats"),
    *_names(f"{_EC}.example_connector", "ECExampleConnectorMetadata MMMeta"),
    *_names(f"{_EC}.cpu.common", "ECCPUConnectorMetadata ECCPUWorkerMetadata"),
    *_names(
        f"{_EC}.mooncake.metadata",
        "ECMooncakeConnectorMetadata ECMooncakeWorkerMetadata ECMooncakeLoadSpec ECMooncakePushSpec",
    ),
    *_names(f"{_EC}.mooncake_store_embedding.data", "TensorSpec"),
)

CONSTRUCTED: tuple[str, ...] = (
    *_names("vllm.sampling_params", "SamplingParams RequestOutputKind"),
    *_names("vllm.pooling_params", "PoolingParams LateInteractionParams"),
    *_names("vllm.lora.request", "LoRARequest"),
    *_names("vllm.v1.executor.multiproc_executor", "WorkerProc.ResponseStatus"),
    *_names("vllm.v1.kv_cache_interface", "KVQuantMode KVCacheSpecKind SparseCacheRole KVCacheGroupRole"),
    *_names("vllm.v1.attention.backends.registry", "MambaAttentionBackendEnum"),
    *_names("vllm.distributed.kv_events", "BlockStored BlockRemoved AllBlocksCleared"),
    *_names("vllm.v1.fault_tolerance.utils", "FaultToleranceRequest FaultToleranceResult"),
    *_names("vllm.v1.engine", "ReconfigureDistributedRequest"),
    *_names("fractions", "Fraction"),
    *_names("collections", "Counter"),
)

_constructed: dict[str, bool] = dict.fromkeys(INSTANCES, False) | dict.fromkeys(CONSTRUCTED, True)
_classes: dict[str, type] = {}


class RefusedClass(SpmdError):
    """A message holds what may not cross the control channel: names it, and the flag that allows it."""


def refuse(name: str) -> RefusedClass:
    """The error for `name` ("module:qualified.name")."""
    return RefusedClass(
        f"{name} may not cross the control channel: it is not on the list of plain data classes"
        f" (if it is a class, and you trust it: --control-allow-class {name})"
    )


def allow_class(name: str) -> None:
    """Let instances of the class `name` ("package.module:Class") cross, in this process.

    For --control-allow-class; call it before the first message. UsageError when `name` has not that form;
    that it exists and is a class is seen when the first instance crosses.
    """
    module, _, qualname = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))):
        raise UsageError(f"--control-allow-class {name}: write it as package.module:Class")
    _constructed.setdefault(name, True)


def allow_instances(names: Iterable[str]) -> None:
    """Let instances of plain data classes cross, in this process; they are rebuilt as INSTANCES are."""
    for name in names:
        _constructed.setdefault(name, False)


def is_constructed(name: str) -> bool | None:
    """Whether instances of `name` are rebuilt by a call of the class; None when they may not cross at all."""
    return _constructed.get(name)


def find_class(name: object) -> type:
    """The class of that name, imported if need be. RefusedClass when it may not cross, or is no class."""
    found = _classes.get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    if not isinstance(name, str) or name not in _constructed:
        raise refuse(str(name)[:200])
    module, _, qualname = name.partition(":")
    try:
        thing: Any = importlib.import_module(module)
        for part in qualname.split("."):
            thing = vars(thing)[part]
    except (ImportError, KeyError, TypeError) as error:
        raise RefusedClass(
            f"{name} came over the control channel but is not installed here: {error}"
        ) from error
    if not isinstance(thing, type):
        raise RefusedClass(f"{name} is allowed on the control channel, but it is no class")
    _classes[name] = thing
    return thing
