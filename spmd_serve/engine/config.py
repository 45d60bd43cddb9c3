"""Parse the command line with vLLM's own parser, and build vLLM's configuration."""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import (
    make_arg_parser,
    propagate_flash_late_interaction,
    validate_parsed_serve_args,
)
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from spmd_serve.config import config_file
from spmd_serve.config import flags as our_flags
from spmd_serve.config.endpoints import Endpoint
from spmd_serve.config.flags import AUTO
from spmd_serve.config.job_spec import ADDITIONAL_CONFIG_KEY, JobSpec
from spmd_serve.errors import UsageError
from spmd_serve.system.network import host_name
from spmd_serve.topology import Layout

DEFAULT_SHUTDOWN_TIMEOUT_S = 20
"""In seconds. vLLM's default aborts requests at once; torchrun kills a signalled job after 30 s."""


class ServeParser(FlexibleArgumentParser):
    """vLLM's parser with our flags first. Errors are one line and raise UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the flags)")


AddFlags = Callable[[argparse.ArgumentParser], None]


def make_parser(more: AddFlags | None = None) -> ServeParser:
    """Return the parser of ``spmd_serve serve``: our flags, those of `more`, then ``vllm serve``'s."""
    parser = ServeParser(
        prog="torchrun ... -m spmd_serve",
        usage="torchrun [torchrun flags] -m spmd_serve [serve] MODEL [flags]",
        description="Serve a model over an OpenAI-compatible HTTP API from all ranks that torchrun started.",
        allow_abbrev=False,
    )
    our_flags.Flags.add_to(parser)
    if more is not None:
        more(parser)
    make_arg_parser(parser)
    for action in parser._actions:
        if action.dest == "data_parallel_size":
            action.type = number_or_auto
            action.help = f"{action.help} {AUTO}: as many replicas as fit on the ranks of this round."
        elif action.dest == "port":
            action.type = _port
            action.help = f"{action.help} Several, with commas: one for each endpoint of a node (see --lb)."
    parser.set_defaults(shutdown_timeout=DEFAULT_SHUTDOWN_TIMEOUT_S)
    return parser


def _port(text: str) -> int | tuple[int, ...]:
    ports = our_flags.port_list(text)
    return ports[0] if len(ports) == 1 else ports


def number_or_auto(text: str) -> int | str:
    """Convert a value of ``--data-parallel-size``. Raises ValueError."""
    return AUTO if text == AUTO else int(text)


def parse_serve(argv: Sequence[str], more: AddFlags | None = None) -> argparse.Namespace:
    """Parse and validate the command line of ``serve``. Raises UsageError with one line."""
    parser = make_parser(more)
    argv = config_file.expand(argv, parser)
    args: argparse.Namespace = parser.parse_args(argv)
    if args.model_tag is not None:
        args.model = args.model_tag
    defaults = {action.dest: action.default for action in parser._actions}
    our_flags.refuse(vars(args), defaults)
    args.given_model = args.model_tag is not None or args.model != defaults["model"]
    if not args.given_model:
        raise UsageError("no model given: write it after -m spmd_serve, or as --model MODEL")
    args.given_sizes = {
        name: getattr(args, name) if getattr(args, name) != defaults[name] or _is_given(argv, flags) else None
        for name, flags in {
            "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
            "pipeline_parallel_size": ("--pipeline-parallel-size", "-pp"),
            "data_parallel_size": ("--data-parallel-size", "-dp"),
        }.items()
    }
    try:
        validate_parsed_serve_args(args)
    except (ValueError, TypeError, KeyError) as problem:
        raise UsageError(one_line(problem)) from problem
    _check_parsers(args)
    return args


def _check_parsers(args: argparse.Namespace) -> None:
    """Check parser names and plugin files, which vLLM checks only when its API server starts."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    _check_parser(
        "--tool-call-parser",
        args.tool_call_parser if args.enable_auto_tool_choice else None,
        ("--tool-parser-plugin", args.tool_parser_plugin),
        ToolParserManager.import_tool_parser,
        ToolParserManager.list_registered,
    )
    _check_parser(
        "--reasoning-parser",
        args.reasoning_parser or args.structured_outputs_config.reasoning_parser,
        ("--reasoning-parser-plugin", args.reasoning_parser_plugin),
        ReasoningParserManager.import_reasoning_parser,
        ReasoningParserManager.list_registered,
    )


def _check_parser(
    flag: str,
    name: str | None,
    plugin: tuple[str, str],
    load: Callable[[str], None],
    registered: Callable[[], Sequence[str]],
) -> None:
    plugin_flag, path = plugin
    if path:
        if path.endswith(".py") and not os.path.isfile(path):
            raise UsageError(f"{plugin_flag} {path} does not exist on {host_name()}")
        load(path)
    if name and name not in registered():
        raise UsageError(f"{flag} {name} is unknown: vLLM has {', '.join(sorted(registered()))}")


def _is_given(argv: Sequence[str], flags: tuple[str, ...]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") in flags for word in argv)


def flag_values(args: argparse.Namespace) -> dict[str, object]:
    """Return all values of the command line, for the comparison between ranks."""
    return {name: value for name, value in vars(args).items() if not name.startswith("given_")}


def apply_layout(args: argparse.Namespace, layout: Layout) -> None:
    """Store the resolved parallel sizes in `args`, so that vLLM uses the layout of all ranks."""
    args.tensor_parallel_size = layout.tp
    args.pipeline_parallel_size = layout.pp
    args.data_parallel_size = layout.dp
    for name in our_flags.VLLMS_LB:
        setattr(args, name, False)


def apply_endpoint(args: argparse.Namespace, endpoint: Endpoint) -> None:
    """Make the API server of an endpoint start engine cores for its own dense replicas only.

    vLLM then sees a server with that many replicas, and nothing of the others.
    """
    args.data_parallel_size = len(endpoint.replicas)


def apply_coupled_endpoint(
    args: argparse.Namespace, endpoint: Endpoint, head_address: str, head_port: int
) -> None:
    """Make the API server of an endpoint start engine cores for its own coupled (MoE) replicas.

    These step together across all endpoints. The engine cores ask the API server of the first endpoint, at
    `head_address` and `head_port`, for vLLM's coordinator, which starts and ends their waves.
    """
    args.data_parallel_hybrid_lb = True  # with one replica, vLLM changes it to external
    args.data_parallel_size_local = len(endpoint.replicas)
    args.data_parallel_start_rank = endpoint.replicas.start
    args.data_parallel_address = head_address
    args.data_parallel_rpc_port = head_port


def apply_executor(args: argparse.Namespace, spec: JobSpec | None = None) -> None:
    """Make vLLM use our executor; with `spec`, pass the job's description on to the drivers."""
    from spmd_serve.engine.executor import TorchrunExecutor

    args.distributed_executor_backend = TorchrunExecutor
    if spec is not None:
        args.additional_config = {
            **(args.additional_config or {}),
            ADDITIONAL_CONFIG_KEY: spec.to_json(),
        }


def engine_config(args: argparse.Namespace) -> Any:
    """Build a VllmConfig as ``vllm serve`` does. Raises UsageError if vLLM rejects the arguments."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    with refusals():
        return engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn every error of vLLM's configuration inside the block into a UsageError with one line."""
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError, NotImplementedError, AssertionError) as problem:
        raise UsageError(one_line(problem)) from problem


def one_line(problem: BaseException) -> str:
    """Return the text of an exception of vLLM or pydantic as one line."""
    errors = getattr(problem, "errors", None)
    if callable(errors):
        texts = [str(item.get("msg", "")) for item in errors()]
    else:
        texts = [str(problem) or type(problem).__name__]
    return "; ".join(" ".join(text.split()) for text in texts if text).removeprefix("Value error, ")
