"""``spmd_serve batch``: answer files of requests; resumable, each line answered once.

    options = BatchOptions.from_namespace(namespace)  # BatchOptions.add_to(parser) made the flags
    prepared = prepare(options, flags, launch)  # before the model loads; UsageError says what is wrong
    code = await run_batch(answer, options, prepared=prepared)

`handlers` (the only file here that imports vLLM, and only when called) makes `answer` out of vLLM's own
endpoints.
"""

from spmd_serve.batch.handlers import run_batch_with_engine
from spmd_serve.batch.loop import Answer, finish_batch, run_batch
from spmd_serve.batch.options import BatchOptions
from spmd_serve.batch.prepare import Launch, Prepared, prepare
from spmd_serve.batch.request_lines import BatchLine

__all__ = [
    "Answer",
    "BatchLine",
    "BatchOptions",
    "Launch",
    "Prepared",
    "finish_batch",
    "prepare",
    "run_batch",
    "run_batch_with_engine",
]
