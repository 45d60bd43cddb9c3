"""What `benchmarks.offline` starts: one run of one side, which notes when it was ready and how long it took.

    batch NOTE ARGUMENTS…        under torchrun: `spmd_serve batch ARGUMENTS`
    run-batch NOTE ARGUMENTS…    vLLM's own run-batch
    ours | stock NOTE PROMPTS SETTINGS    under torchrun: a script with spmd_serve.LLM, or vLLM's LLM

NOTE gets {"ready": Unix time when the engine could take work, "seconds": from then to the last answer}.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def note(path: str, ready: float) -> None:
    Path(path).write_text(json.dumps({"ready": ready, "seconds": time.time() - ready}))


def timed(run: Callable[..., Awaitable[Any]], path: str) -> Callable[..., Awaitable[Any]]:
    """A batch's run, which begins when the engine is ready and ends when the output is written."""

    async def measured(*args: Any, **kwargs: Any) -> Any:
        ready = time.time()
        result = await run(*args, **kwargs)
        note(path, ready)
        return result

    return measured


def batch(path: str, *arguments: str) -> None:
    from spmd_serve.batch.handlers import run_batch_with_engine
    from spmd_serve.commands import batch as batch_command
    from spmd_serve.main import main

    # Rank 0's child is forked from here.
    vars(batch_command)["run_batch_with_engine"] = timed(run_batch_with_engine, path)
    main(["batch", *arguments])


def run_batch(path: str, *arguments: str) -> None:
    from vllm.entrypoints.launchers import run_batch as stock

    stock.run_batch = timed(stock.run_batch, path)
    sys.argv[1:] = arguments
    asyncio.run(stock.main(stock.parse_args()))


def script(side: str, path: str, prompts: str, settings: str) -> None:
    """The same lines for both sides; every rank runs them, rank 0 takes notes."""
    import vllm
    from vllm import SamplingParams

    import spmd_serve

    wanted = json.loads(settings)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=wanted["output_tokens"])
    texts = json.loads(Path(prompts).read_text())
    made: Any = spmd_serve.LLM if side == "ours" else vllm.LLM
    llm = made(wanted["model"], distributed_executor_backend="external_launcher", **wanted["engine"])
    ready = time.time()
    outputs = llm.generate(texts, sampling, use_tqdm=False)
    assert len(outputs) == len(texts)
    if os.environ["RANK"] == "0":
        note(path, ready)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "batch":
        batch(*rest)
    elif what == "run-batch":
        run_batch(*rest)
    else:
        script(what, *rest)
