"""The arguments of `LLM(...)`: our own, vLLM's, and the sizes, which follow torchrun's ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spmd_serve.config import flags as our_flags
from spmd_serve.config.flags import Flags
from spmd_serve.errors import UsageError
from spmd_serve.topology import Layout

OUTPUTS_ON = ("all", "driver")
EXTERNAL = "external_launcher"

FLAGS = tuple(item.name for item in fields(Flags) if item.name not in ("head", "lb", "probe_port"))
"""Flags of `spmd_serve serve` that LLM() takes as arguments of the same name."""

_SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}


@dataclass(frozen=True)
class Options:
    """Our own arguments.

    outputs_on: "all" ranks get a call's result, or only the "driver" (others None).  call_timeout: seconds
    for all ranks to make the same call.  external: the script was written for vLLM's external launcher: each
    replica gets its own prompts.  given: the sizes as given, None if not given.
    """

    outputs_on: str
    call_timeout: float
    flags: Flags
    external: bool
    given: Mapping[str, int | None]

    def layout(self, ranks_per_node: Sequence[int], hosts: Sequence[str]) -> Layout:
        """Return the layout of the ranks. Raises UsageError if the sizes do not match torchrun's ranks."""
        given = dict(self.given)
        if self.external:  # a size that is not given is 1, and the remaining ranks are replicas
            given["tp"], given["pp"] = given["tp"] or 1, given["pp"] or 1
        return Layout.resolve(
            ranks_per_node, given["tp"], given["pp"], given["dp"], fill_dp=self.external, hostnames=hosts
        )


def split(arguments: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Return our options, and vLLM's arguments without sizes. Raises UsageError for an invalid option."""
    engine = dict(arguments)
    outputs_on = engine.pop("outputs_on", "all")
    if outputs_on not in OUTPUTS_ON:
        raise UsageError(f"outputs_on={outputs_on!r}: write one of {', '.join(OUTPUTS_ON)}")
    call_timeout = float(engine.pop("call_timeout", 300.0))
    if call_timeout <= 0:
        raise UsageError(f"call_timeout must be above 0 seconds, got {call_timeout:g}")
    backend = engine.pop("distributed_executor_backend", None)
    if backend not in (None, EXTERNAL):
        raise UsageError(
            f"distributed_executor_backend={backend!r}: leave it out: torchrun's ranks are the executor"
        )
    given = {short: engine.pop(name, None) for short, name in _SIZES.items()}
    extension = engine.get("worker_extension_cls")
    if isinstance(extension, type):
        engine["worker_extension_cls"] = f"{extension.__module__}.{extension.__qualname__}"
    flags = _flags({name: engine.pop(name) for name in FLAGS if name in engine})
    return Options(outputs_on, call_timeout, flags, backend == EXTERNAL, given), _without_none(engine)


def refuse(engine: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM that contradict torchrun; `defaults` are vLLM's. Raises UsageError."""
    unknown = [name for name in engine if name not in defaults and name not in _ONLY_LLM]
    if unknown:
        raise UsageError(f"LLM() has no argument {unknown[0]!r}")
    our_flags.refuse(engine, defaults)


_ONLY_LLM = ("chat_template",)
"""Arguments of vllm.LLM that its engine does not take."""


def engine_only(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of vllm.LLM that vLLM's engine takes."""
    return {name: value for name, value in engine.items() if name not in _ONLY_LLM}


def _flags(given: dict[str, Any]) -> Flags:
    if "control_allow_class" in given:
        given["control_allow_class"] = tuple(given["control_allow_class"])
    backend = given.get("control_backend", "auto")
    if backend not in ("auto", "gloo"):
        raise UsageError(f"control_backend={backend!r}: scripts have auto and gloo")
    flags = Flags(**given)
    for name in ("join_timeout", "rank_timeout", "step_timeout"):
        if getattr(flags, name) <= 0:
            raise UsageError(f"{name} must be above 0 seconds, got {getattr(flags, name)}")
    return flags


def _without_none(engine: dict[str, Any]) -> dict[str, Any]:
    """vllm.LLM accepts None for a default value; most arguments of its engine do not."""
    return {name: value for name, value in engine.items() if value is not None}
