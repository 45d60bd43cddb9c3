"""A worker extension (``--worker-extension-cls``) that notes when a rank computes which batch."""

import time
from typing import Any


class StageClock:
    """Methods that vLLM adds to each rank's worker; called through /collective_rpc.

    A note is [start, end, tokens, request ids]: seconds of the machine's monotonic clock around the model's
    forward pass alone, so that waiting for the stage before does not count as work.
    """

    model_runner: Any

    def clock_start(self) -> None:
        """Forgets all notes and takes notes from now on."""
        runner, notes = self.model_runner, []  # type: ignore[var-annotated]
        runner.stage_notes = notes
        if hasattr(runner, "stage_batch"):
            return
        runner.stage_batch = None
        execute_model, forward = runner.execute_model, runner._model_forward

        def execute_noted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            runner.stage_batch = scheduler_output
            return execute_model(scheduler_output, *args, **kwargs)

        def forward_noted(*args: Any, **kwargs: Any) -> Any:
            batch, started = runner.stage_batch, time.monotonic()
            output = forward(*args, **kwargs)
            requests = sorted(batch.num_scheduled_tokens)
            runner.stage_notes.append([started, time.monotonic(), batch.total_num_scheduled_tokens, requests])
            return output

        runner.execute_model, runner._model_forward = execute_noted, forward_noted

    def clock_read(self) -> list[list[Any]]:
        """All notes since clock_start."""
        notes: list[list[Any]] = self.model_runner.stage_notes
        return notes

    def held_requests(self) -> list[str]:
        """The requests that this rank keeps state for."""
        return sorted(self.model_runner.requests)
