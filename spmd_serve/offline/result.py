"""What a call gave, on its way to the other ranks: a value, or the error that every rank raises."""

import importlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from spmd_serve.errors import SpmdError
from spmd_serve.wire.allowed_classes import allow_instances

_OF_OUTPUTS = """
    RequestOutput CompletionOutput SamplingMask WeightVersionSpan RequestError
    PoolingRequestOutput PoolingOutput EmbeddingRequestOutput EmbeddingOutput
    ClassificationRequestOutput ClassificationOutput ScoringRequestOutput ScoringOutput
"""
ANSWER_CLASSES: tuple[str, ...] = (
    *(f"vllm.outputs:{name}" for name in _OF_OUTPUTS.split()),
    "vllm.logprobs:Logprob",
    "vllm.v1.metrics.stats:RequestStateStats",
    "vllm.v1.metrics.stats:RequestSpecDecodeMetrics",
    "vllm.entrypoints.generate.beam_search.utils:BeamSearchOutput",
    "vllm.entrypoints.generate.beam_search.utils:BeamSearchSequence",
    *(f"vllm.v1.metrics.reader:{name}" for name in ("Metric", "Counter", "Vector", "Gauge", "Histogram")),
)
"""Plain data that answers of vLLM.LLM's methods hold, beside what the control channel knows already."""

# An error is rebuilt from its text only where its class is one of these; its constructor takes a message.
_ERRORS_FROM = ("builtins", "vllm.exceptions", "spmd_serve.errors", "spmd_serve.wire.allowed_classes")


class DriverError(SpmdError):
    """What a call raised on the rank that drives, where its class is not one that can be sent."""


@dataclass(frozen=True)
class Outcome:
    """`error` is the exception itself where it was raised, and one of the same kind and text elsewhere."""

    value: Any = None
    error: Exception | None = None

    def take(self) -> Any:
        """The value; raises the error."""
        if self.error is not None:
            self.throw()
        return self.value

    def throw(self) -> NoReturn:
        """Raise the error."""
        assert self.error is not None
        raise self.error

    def to_plain(self) -> list[Any]:
        """For the wire; `value` as it is."""
        if self.error is None:
            return ["value", self.value]
        kind = type(self.error)
        return ["error", kind.__module__, kind.__qualname__, str(self.error)]

    @classmethod
    def from_plain(cls, plain: Any) -> "Outcome":
        """Inverse of `to_plain`."""
        if plain[0] == "value":
            return cls(plain[1])
        return cls(error=_error(*map(str, plain[1:])))


def allow_answers() -> None:
    """Let the answers of vLLM.LLM's methods cross, in this process."""
    allow_instances(ANSWER_CLASSES)


def _error(module: str, name: str, text: str) -> Exception:
    if module in _ERRORS_FROM and name.isidentifier():
        kind = getattr(importlib.import_module(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(TypeError):  # its constructor wants more than a message
                return kind(text)
    return DriverError(f"{name}: {text}")
