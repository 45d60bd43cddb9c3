"""Checks before the model loads: flags, input, output, its lock, and whether an earlier run matches."""

import hashlib
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from spmd_serve.batch.journal import Journal
from spmd_serve.batch.options import STDIO, BatchOptions, is_url
from spmd_serve.batch.outputs import FileOutput, Output, StreamOutput
from spmd_serve.batch.records import StateHeader
from spmd_serve.batch.source import InputSource
from spmd_serve.config.flags import Flags
from spmd_serve.errors import UsageError

# Flags of placement, speed and observability, which may differ between two runs on one output.
# Every other flag decides the answers.
_NAMES = """
aggregate_engine_logging all2all_backend api_key api_server_count async_scheduling block_size
code_revision collect_detailed_traces config cp_kv_cache_interleave_size cpu_distributed_timeout_seconds
cpu_offload_gb cpu_offload_params cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets
decode_context_parallel_size device_ids disable_access_log_for_endpoints disable_custom_all_reduce
disable_fastapi_docs disable_log_stats disable_uvicorn_access_log distributed_executor_backend
distributed_timeout_seconds download_dir enable_chunked_prefill enable_expert_parallel enable_log_deltas
enable_log_outputs enable_log_requests enable_prefix_caching enforce_eager
gpu_memory_utilization headless help hf_token host ignore_patterns kv_cache_memory_bytes load_format
log_config_file log_error_stack log_level logging_config long_prefill_token_threshold master_addr
master_port max_cudagraph_capture_size max_log_len max_num_active_seqs max_num_batched_tokens
max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs
max_parallel_loading_workers middleware model_tag nnodes node_rank num_gpu_blocks_override
otlp_traces_endpoint performance_mode pipeline_parallel_size port prefill_context_parallel_size
profiler_config renderer_num_workers root_path scheduler_cls scheduling_policy
show_hidden_metrics_for_version shutdown_timeout stream_interval tensor_parallel_size ubatch_size uds
use_tqdm_on_load uvicorn_log_level watermark
"""
OPERATIONAL = frozenset(_NAMES.split())
OURS = frozenset(item.name for options in (Flags, BatchOptions) for item in fields(options))
OPERATIONAL_PREFIXES = (
    "allow_credentials",
    "allowed_headers",
    "allowed_methods",
    "allowed_origins",
    "data_parallel_",
    "dbo_",
    "dp_",
    "enable_dbo",
    "enable_ssl",
    "eplb",
    "enable_eplb",
    "grpc",
    "h11_",
    "jit_monitor",
    "kv_cache_metrics",
    "numa_",
    "offload_",
    "kv_offloading_",
    "safetensors_",
    "sse_",
    "ssl_",
)


@dataclass(frozen=True)
class Launch:
    """The job that runs this batch, which tells a restart by torchrun from a new command.

    `job` is unique to a job and stays the same across restarts on one node (hostname, pid and start time of
    the torchrun agent); empty if unknown. `restarted` is true if any torchrun agent has restarted its ranks,
    also if rank 0 has moved to another node.
    """

    job: str = ""
    restarted: bool = False


@dataclass(frozen=True)
class Prepared:
    """An open input and a locked output. A forked child may use it in place of the process that made it."""

    options: BatchOptions
    source: InputSource
    output: Output
    total: int | None
    """Number of lines, including those that earlier runs have answered; None for a pipe."""

    @property
    def is_complete(self) -> bool:
        """Return whether every line is answered already, so that no model is needed."""
        return self.total is not None and len(self.output.done) == self.total

    def close(self) -> None:
        """Close the input and release the output. May be called twice."""
        self.output.close()
        self.source.close()


def say(text: str) -> None:
    """Print one line to the log of this rank."""
    print(f"spmd_serve: {text}", file=sys.stderr, flush=True)


def prepare(
    options: BatchOptions,
    flags: Mapping[str, str] | None = None,
    launch: Launch = Launch(),
    say: Callable[[str], None] = say,
) -> Prepared:
    """Open the input and the output, and find the lines that are answered already.

    `flags` are vLLM's flags that decide the answers. Reads the whole input file and an earlier output once,
    about 1 GB per second. Raises UsageError with a one-line message, and changes no file then.
    """
    options.check()
    if options.output_tmp_dir is not None and not os.path.isdir(options.output_tmp_dir):
        raise UsageError(f"--output-tmp-dir {options.output_tmp_dir} is no directory: make it first")
    source = InputSource.open(options.source, options.output_tmp_dir)
    try:
        output, total = _open_output(options, source, {**options.fingerprint(), **(flags or {})}, launch, say)
    except BaseException:
        source.close()
        raise
    return Prepared(options, source, output, total)


def _open_output(
    options: BatchOptions,
    source: InputSource,
    flags: Mapping[str, str],
    launch: Launch,
    say: Callable[[str], None],
) -> tuple[Output, int | None]:
    path = local_path(options)
    if path == STDIO or _is_stream(path):
        if launch.restarted:
            raise UsageError(
                f"torchrun has restarted a run whose answers went to {options.destination}: they can't be "
                "told from those to come; give -o FILE to be able to go on after a crash"
            )
        content = source.identify()
        return StreamOutput(path, ordered=options.ordered), None if content is None else content.lines
    _check_path(path, source)
    journal = Journal(path, say)
    try:
        if source.is_pipe and journal.begun_by(launch.job):
            raise UsageError(
                f"torchrun has restarted a run that was reading {source.name}: what was read of it is gone. "
                "Run the command again, with the whole input, to go on"
            )
        content = source.identify()
        header = StateHeader(content, flags)
        journal.start(
            header,
            job=launch.job,
            restarted=launch.restarted,
            restart=options.restart,
            retry_failed=options.retry_failed,
        )
        complete = content is not None and len(journal.done) == content.lines
        if options.max_errors is not None and journal.failed > options.max_errors and not complete:
            raise UsageError(
                f"{journal.failed} lines in {path} have failed, --max-errors is {options.max_errors}: "
                "raise it, or ask for those lines again with --retry-failed"
            )
    except BaseException:
        journal.close()
        raise
    upload_to = options.destination if is_url(options.destination) else None
    output = FileOutput(journal, ordered=options.ordered, upload_to=upload_to, say=say)
    return output, None if content is None else content.lines


def local_path(options: BatchOptions) -> str:
    """Return the file for the answers; for a URL, named after it without its query (signatures change)."""
    path = options.destination
    if not is_url(path):
        # The lock and the renames of a rewrite are for the file itself, whatever links lead to it.
        return os.path.realpath(path) if os.path.islink(path) and not _is_stream(path) else path
    parts = urlsplit(path)
    digest = hashlib.sha256(f"{parts.netloc}{parts.path}".encode()).hexdigest()[:8]
    name = os.path.basename(parts.path) or "answers.jsonl"
    return os.path.join(options.output_tmp_dir or ".", f"{digest}-{name}")


def _is_stream(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _check_path(path: str, source: InputSource) -> None:
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise UsageError(f"the output's directory {directory} does not exist: make it first")
    if os.path.isdir(path):
        raise UsageError(f"the output {path} is a directory: name a file")
    for taken in (path, path + ".state"):
        if source.is_same_file(taken):
            raise UsageError(f"the output {path} would overwrite the input {source.name}: name another -o")


def answer_flags(given: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, str]:
    """Return vLLM's flags, by name, that differ from their defaults and may change an answer.

    `given` holds a parsed namespace, `defaults` the parser's defaults; names that are not in `defaults` are
    ignored, and so are the flags of `BatchOptions` (see `BatchOptions.fingerprint`). Parallel sizes are left
    out, so that a run can continue on fewer GPUs; so are secrets.
    """
    shown = {}
    for name, value in given.items():
        if name not in defaults or value == defaults[name] or name in OPERATIONAL | OURS:
            continue
        if not name.startswith(OPERATIONAL_PREFIXES):
            # vLLM gives its transfer configurations a random engine_id, which decides no answer.
            shown["--" + name.replace("_", "-")] = re.sub(r"\bengine_id='[^']*', ", "", str(value))
    return shown
