"""The worker methods of a step, with failures reported to the watcher: vLLM's worker loop calls these."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StepWorker:
    """Wraps vLLM's worker. All attributes that are not defined here are those of the wrapped worker.

    If one of these methods fails on one rank, the other ranks wait in a collective operation for ever. So
    a failure is fatal for the job, and `on_failure` reports it before the exception takes its usual way.
    """

    def __init__(self, worker: Any, on_failure: Callable[[str, Exception], None]) -> None:
        """`on_failure` is called with the name of the method and the exception."""
        self.wrapped = worker
        self._on_failure = on_failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def execute_and_sample(self, scheduler_output: Any) -> Any:
        """Run one step of a batch without grammar bitmask.

        Return the sampled output, or on other pipeline stages what `execute_model` returned.
        """
        with self._reported("execute_and_sample"):
            output = self.wrapped.execute_model(scheduler_output)
            return self.wrapped.sample_tokens(None) if output is None else output

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the model on a batch that needs a grammar bitmask before its tokens are sampled."""
        with self._reported("execute_model"):
            return self.wrapped.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the tokens of the batch that `execute_model` ran last."""
        with self._reported("sample_tokens"):
            return self.wrapped.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """Run the model without requests, because coupled (MoE) replicas step together."""
        with self._reported("execute_dummy_batch"):
            self.wrapped.execute_dummy_batch()

    @contextmanager
    def _reported(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            self._on_failure(method, problem)
            raise


STEP_METHODS = tuple(
    method.__name__
    for method in (
        StepWorker.execute_and_sample,
        StepWorker.execute_model,
        StepWorker.sample_tokens,
        StepWorker.execute_dummy_batch,
    )
)
"""Names of the worker methods that make a step."""
