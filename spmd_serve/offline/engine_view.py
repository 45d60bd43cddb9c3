"""`llm.llm_engine` on every rank, with the attributes that scripts written for vLLM use.

Methods of vLLM's LLMEngine are collective calls. The configuration, and this rank's own shard
(`model_executor.driver_worker`), are available on every rank.
"""

import copy
import inspect
from typing import Any

from vllm.v1.engine.llm_engine import LLMEngine

from spmd_serve.offline.call_check import own_call
from spmd_serve.offline.session import Session
from spmd_serve.offline.split_prompts import combine


class ExecutorView:
    """`llm_engine.model_executor`: gives access to this rank's shard, and calls all shards."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def driver_worker(self) -> Any:
        """vLLM's worker of this rank (`.worker`, `.model_runner.model`); use it only between calls."""
        return self._session.shard.worker

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """Run a worker method on every rank; a collective call."""
        return EngineView(self._session).collective_rpc(*args, **kwargs)


class EngineView:
    """Replacement for vLLM's LLMEngine."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def vllm_config(self) -> Any:
        """vLLM's configuration; with this rank's data-parallel numbers if the script passed a size."""
        session = self._session
        config = copy.copy(session.config)
        if session.options.given["dp"] is not None:
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.data_parallel_size = session.layout.dp
            config.parallel_config.data_parallel_rank = session.replica
        return config

    @property
    def model_config(self) -> Any:
        """vLLM's model configuration."""
        return self._session.config.model_config

    @property
    def model_executor(self) -> ExecutorView:
        """The executor (see `ExecutorView`)."""
        return ExecutorView(self._session)

    def __getattr__(self, name: str) -> Any:
        method = inspect.getattr_static(LLMEngine, name, None)
        if name.startswith("_") or not inspect.isfunction(method):
            raise AttributeError(
                f"llm_engine has no attribute {name!r} here: vLLM's engine exists on the driver's rank only"
            )
        session = self._session

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(method).bind(None, *args, **kwargs).arguments
            arguments = {key: value for key, value in bound.items() if key != "self"}
            own = own_call(name, arguments)

            def run() -> Any:
                if own is not None:
                    return session.run_own(arguments.get("timeout"))
                return getattr(session.llm.llm_engine, name)(*args, **kwargs)

            return session.call(
                f"llm_engine.{name}", arguments, run, lambda values: combine(name, values), own=own
            )

        return call
