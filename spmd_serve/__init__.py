"""vLLM on every rank of a torchrun job: an HTTP server, a batch command, and `LLM` for scripts.

Importing the package imports neither vLLM nor torch; `spmd_serve.LLM` and `spmd_serve.SamplingParams` do.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import SamplingParams

    from spmd_serve.offline.llm import LLM

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from spmd_serve.offline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from vllm import SamplingParams

        return SamplingParams
    if name == "__version__":
        from spmd_serve.main import own_version

        return own_version()
    raise AttributeError(f"module 'spmd_serve' has no attribute {name!r}")
