"""The result of a call as sent to the other ranks: a value, or the error that every rank raises."""

import importlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spmd_serve.errors import SpmdError
from spmd_serve.wire.allowed_classes import allow_instances

_OUTPUT_CLASSES = """
    RequestOutput CompletionOutput SamplingMask WeightVersionSpan RequestError
    PoolingRequestOutput PoolingOutput EmbeddingRequestOutput EmbeddingOutput
    ClassificationRequestOutput ClassificationOutput ScoringRequestOutput ScoringOutput
"""
RESULT_CLASSES: tuple[str, ...] = (
    *(f"vllm.outputs:{name}" for name in _OUTPUT_CLASSES.split()),
    "vllm.logprobs:Logprob",
    "vllm.v1.metrics.stats:RequestStateStats",
    "vllm.v1.metrics.stats:RequestSpecDecodeMetrics",
    "vllm.entrypoints.generate.beam_search.utils:BeamSearchOutput",
    "vllm.entrypoints.generate.beam_search.utils:BeamSearchSequence",
    *(f"vllm.v1.metrics.reader:{name}" for name in ("Metric", "Counter", "Vector", "Gauge", "Histogram")),
)
"""Plain data in the results of vllm.LLM's methods, in addition to the classes that the channel allows."""

# An error is rebuilt from its message only if its class is defined in one of these modules.
_ERRORS_FROM = ("builtins", "vllm.exceptions", "spmd_serve.errors", "spmd_serve.wire.allowed_classes")


class DriverError(SpmdError):
    """An error of the driver's rank whose class cannot be sent; the message names the class."""


@dataclass(frozen=True)
class CallResult:
    """`error` is the exception itself on the rank that raised it, a copy without traceback on the others."""

    value: Any = None
    error: Exception | None = None

    def take(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value

    def to_plain(self) -> list[Any]:
        """Return a list for the codec; `value` is not converted."""
        if self.error is None:
            return ["value", self.value]
        kind = type(self.error)
        return ["error", kind.__module__, kind.__qualname__, str(self.error)]

    @classmethod
    def from_plain(cls, plain: Any) -> "CallResult":
        """Return the result that `to_plain` has converted."""
        if plain[0] == "value":
            return cls(plain[1])
        return cls(error=_error(*map(str, plain[1:])))


def allow_results() -> None:
    """Allow the result classes of vllm.LLM's methods in this process's codec."""
    allow_instances(RESULT_CLASSES)


def _error(module: str, name: str, text: str) -> Exception:
    if module in _ERRORS_FROM and name.isidentifier():
        kind = getattr(importlib.import_module(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(TypeError):  # the constructor needs more arguments
                return kind(text)
    return DriverError(f"{name}: {text}")
