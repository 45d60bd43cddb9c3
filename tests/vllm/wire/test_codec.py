"""The codec's list against the installed vLLM: what crosses is on it, and what is on it is only data."""

import dataclasses
import enum
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spmd_serve.wire.allowed_classes import CONSTRUCTED, INSTANCES, find_class
from spmd_serve.wire.codec import RefusedClass, decode, encode

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's imports warn of much

# What vLLM's own modules need besides vLLM, for connectors that are optional.
OPTIONAL = {"lmcache", "mooncake", "msgpack", "nixl", "mori", "hf3fs_fuse"}

# What hints reach but never crosses: bases without instances, and state that stays with the scheduler.
NOT_SENT = {
    "vllm.v1.core.sched.output:KVConnectorBlockState",
    "vllm.config.ec_manager_config:EncoderCacheManagerMetadata",
    "vllm.multimodal.inputs:BaseMultiModalField",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata",
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorMetadata",
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorWorkerMetadata",
    "vllm.distributed.kv_events:KVConnectorKVEvents",
}

# What the pickle machine can call on an instance, with data of the sender's choice ...
CALLABLE = ("__call__", "append", "extend", "add", "__setitem__", "__setstate__", "__del__", "__reduce__")
# ... and the classes where that was read and does no more than store.
ONLY_STORES = {"MultiKVConnectorStats.__setitem__", "MooncakeKVConnectorStats.__setstate__"}

ROOTS = (
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.core.sched.output:GrammarOutput",
    "vllm.v1.outputs:ModelRunnerOutput",
    "vllm.v1.outputs:DraftTokenIds",
    "vllm.v1.kv_cache_interface:KVCacheConfig",
    "vllm.v1.worker.worker_base:CompilationTimes",
    "vllm.lora.request:LoRARequest",
    "vllm.multimodal.inputs:MultiModalKwargsItems",
    # hints that vLLM replaces by `object` at run time
    "vllm.multimodal.inputs:MultiModalFeatureSpec",
    "vllm.sampling_params:SamplingParams",
    "vllm.pooling_params:PoolingParams",
    "vllm.v1.core.kv_cache_utils:KVCacheBlockCopy",
    "vllm.distributed.aux_output_connector.connector:AuxOutputConnectorMetadata",
    "vllm.distributed.aux_output_connector.connector:AuxRequestOutput",
)


def listed() -> Iterator[tuple[str, type]]:
    for name in (*INSTANCES, *CONSTRUCTED):
        try:
            yield name, find_class(name)
        except RefusedClass as error:
            missing = error.__cause__
            assert isinstance(missing, ImportError) and missing.name in OPTIONAL, error


def name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        yield hint
    for argument in typing.get_args(hint):
        yield from classes_in(argument)


def hints_of(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        if not base.__module__.startswith("vllm"):
            continue
        scope = vars(sys.modules[base.__module__]) | {"np": np, "torch": torch}
        for hint in inspect.get_annotations(base).values():
            try:
                yield eval(hint, scope) if isinstance(hint, str) else hint
            except NameError:
                continue  # imported for type checking only: those are among the roots


def test_what_scheduler_and_workers_can_send_is_listed() -> None:
    reached: set[type] = set()
    todo = [find_class(name) for name in ROOTS]
    while todo:
        cls = todo.pop()
        if cls in reached or not cls.__module__.startswith("vllm"):
            continue
        reached.add(cls)
        todo += cls.__subclasses__()
        for hint in hints_of(cls):
            todo += classes_in(hint)
    unlisted = {name_of(cls) for cls in reached} - {*INSTANCES, *CONSTRUCTED} - NOT_SENT
    assert not unlisted
    assert len(reached) > 40


def test_listed_classes_are_here_and_can_do_no_harm_when_rebuilt() -> None:
    found = dict(listed())
    assert len(found) > 100
    for name, cls in found.items():
        assert not issubclass(cls, Exception | types.ModuleType | type), name
        assert not (name in INSTANCES and issubclass(cls, enum.Enum)), f"{name} belongs to CONSTRUCTED"
        for base in cls.__mro__:
            if not base.__module__.startswith("vllm"):
                continue
            verbs = {f"{base.__qualname__}.{verb}" for verb in CALLABLE if verb in vars(base)}
            assert verbs <= ONLY_STORES, name


def scheduler_output() -> Any:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    field = MultiModalFlatField(slices=[slice(0, 4)], dim=0, keep_on_cpu=True)
    item = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data=torch.ones(4, 3), field=field)})
    mask = torch.tensor([True, False])
    feature = MultiModalFeatureSpec(item, "image", "hash", PlaceholderRange(2, 2, is_embed=mask))
    sampling = SamplingParams(
        temperature=0.7,
        seed=1,
        stop=["x"],
        logprobs=3,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": {"a": [1]}},
    )
    request = NewRequestData(
        req_id="r0",
        prompt_token_ids=[1, 2, 3],
        mm_features=[feature],
        sampling_params=sampling,
        pooling_params=None,
        block_ids=([1, 2],),
        num_computed_tokens=0,
        lora_request=LoRARequest("lora", 1, "/path"),
        prompt_embeds=torch.ones(3, 8, dtype=torch.bfloat16),
    )
    pooling = dataclasses.replace(
        request, req_id="r1", sampling_params=None, pooling_params=PoolingParams(task="embed")
    )
    cached = CachedRequestData(["r2"], {"r2"}, [[1]], {"r2": [1, 2]}, [None], [2], [1])
    return SchedulerOutput(
        scheduled_new_reqs=[request, pooling],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"r0": 3, "r1": 3, "r2": 1},
        total_num_scheduled_tokens=7,
        scheduled_spec_decode_tokens={"r2": [5]},
        scheduled_encoder_inputs={"r0": [0]},
        finished_req_ids={"r9"},
        free_encoder_mm_hashes=["h"],
    )


def model_runner_output() -> Any:
    from vllm.v1.outputs import (
        ECConnectorOutput,
        KVConnectorOutput,
        LogprobsLists,
        LogprobsTensors,
        ModelRunnerOutput,
        SamplingMaskLists,
    )

    lists = LogprobsLists(np.array([[1]]), np.array([[0.5]], dtype=np.float32), np.array([1]), [1])
    tensors = LogprobsTensors(torch.tensor([[1]]), torch.tensor([[0.5]]), torch.tensor([1]))
    return ModelRunnerOutput(
        req_ids=["r0"],
        req_id_to_index={"r0": 0},
        sampled_token_ids=[[7]],
        logprobs=lists,
        prompt_logprobs_dict={"r0": tensors, "r1": None},
        pooler_output=[torch.ones(4), None],
        kv_connector_output=KVConnectorOutput(finished_sending={"r0"}, invalid_block_ids={3}),
        ec_connector_output=ECConnectorOutput(finished_recving={"h"}),
        sampling_masks=SamplingMaskLists(np.array([1, 2]), np.array([0, 2])),
    )


def kv_cache_config() -> Any:
    from vllm.v1 import kv_cache_interface as kv

    full = kv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    mamba = kv.MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
    uniform = kv.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": full})
    return kv.KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[kv.KVCacheTensor(size=100, layers=["layer.0"], layer_stride=1, block_stride=2)],
        kv_cache_groups=[kv.KVCacheGroupSpec(["layer.0"], spec) for spec in (full, mamba, uniform)],
    )


def answers() -> Any:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.worker_base import CompilationTimes

    return [
        (WorkerProc.ResponseStatus.SUCCESS, ("generate", "embed")),
        GrammarOutput(["r0"], np.full((1, 4), -1, dtype=np.int32)),
        DraftTokenIds(["r0"], [[1, 2]]),
        CompilationTimes(1.5, 0.0),
        {1, 2},
        [["LBNHC"]],
    ]


def connector_data() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        NixlHandshakePayload,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        TransferJob,
    )
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    nixl = NixlConnectorMetadata()
    nixl.add_new_req_to_save("r0", ([1],), {})
    job = TransferJob("r0", GPULoadStoreSpec([1, 2], [2], [0]), CPULoadStoreSpec([3]))
    handshake = {(0, 0): NixlHandshakePayload(compatibility_hash="h", agent_metadata_bytes=b"x")}
    return [nixl, OffloadingConnectorMetadata({1: job}, {}), handshake]


@pytest.mark.parametrize(
    "make", [scheduler_output, model_runner_output, kv_cache_config, answers, connector_data]
)
def test_round_trip(make: Callable[[], Any]) -> None:
    value = make()
    assert plain(decode(encode(value))) == plain(value)


def plain(value: Any) -> Any:
    """`value` as something that compares by content, types included."""
    name = name_of(type(value))
    if isinstance(value, torch.Tensor | np.ndarray):
        return name, str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return name, {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return name, [plain(item) for item in value]
    if hasattr(value, "__struct_fields__"):
        return name, [plain(getattr(value, field)) for field in value.__struct_fields__]
    if (
        hasattr(value, "__dict__")
        and type(value).__module__.startswith("vllm")
        and not isinstance(value, enum.Enum)
    ):
        return name, {key: plain(item) for key, item in vars(value).items()}
    return name, value


def test_every_worker_answer_type_of_the_executor_interface_is_listed() -> None:
    """vLLM's Executor says in its hints what workers answer."""
    executor = importlib.import_module("vllm.v1.executor.abstract").Executor
    seen = set()
    for _, method in inspect.getmembers(executor, inspect.isfunction):
        for hint in inspect.get_annotations(method).values():
            seen |= {cls for cls in classes_in(hint) if cls.__module__.startswith("vllm")}
    names = {name_of(cls) for cls in seen if dataclasses.is_dataclass(cls) or issubclass(cls, tuple)}
    not_sent = {"vllm.config.vllm:VllmConfig"}
    assert names - {*INSTANCES, *CONSTRUCTED} - not_sent == set()
    assert "vllm.v1.outputs:ModelRunnerOutput" in names
