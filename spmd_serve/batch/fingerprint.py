"""Which of vLLM's flags decide the answers, so that a rerun with others is refused."""

from collections.abc import Mapping
from dataclasses import fields

from spmd_serve.batch.options import BatchOptions
from spmd_serve.config.flags import Flags

# Where and how fast it runs, who may watch: may change between two runs on one output.
# A flag not named here counts.
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


def answer_flags(given: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, str]:
    """vLLM's flags, by name, that differ from their defaults and may change an answer.

    `given` is a parsed namespace's content, `defaults` the parser's (only names in it count, and not ours:
    `BatchOptions.fingerprint` has those).
    Sizes of parallelism are left out: a job that goes on with fewer GPUs goes on. So are secrets.
    """
    shown = {}
    for name, value in given.items():
        if name not in defaults or value == defaults[name] or name in OPERATIONAL | OURS:
            continue
        if not name.startswith(OPERATIONAL_PREFIXES):
            shown["--" + name.replace("_", "-")] = str(value)
    return shown
