"""vLLM's own parser reads the command line; flags that contradict torchrun are rejected in one line."""

import argparse
from pathlib import Path

import pytest

from spmd_serve.config.flags import REFUSED, TORCHRUN_OWNS
from spmd_serve.errors import UsageError
from spmd_serve.topology import Layout

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

# A value for each flag that is refused; None for a switch.
VALUES = {
    "nnodes": "2",
    "node_rank": "1",
    "master_addr": "node0",
    "master_port": "29502",
    "headless": None,
    "distributed_executor_backend": "mp",
    "ray_workers_use_nsight": None,
    "data_parallel_rank": "1",
    "data_parallel_start_rank": "1",
    "data_parallel_size_local": "1",
    "data_parallel_address": "node0",
    "data_parallel_rpc_port": "1234",
    "data_parallel_multi_port_external_lb": None,
    "prefill_context_parallel_size": "2",
    "grpc": None,
    "numa_bind": None,
    "enable_elastic_ep": None,
}


def parse(*words: str) -> argparse.Namespace:
    from spmd_serve.engine.config import parse_serve

    return parse_serve(words)


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(*words)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_vllm_flags_keep_their_meaning() -> None:
    args = parse(
        *("some/model", "--dtype", "float32", "--max-model-len", "1k", "--enable-lora", "--api-key", "a"),
        *("--served-model-name", "m", "--join-timeout", "5", "-cc", '{"mode":3}', "--enforce_eager"),
    )
    assert args.model == "some/model"
    assert (args.dtype, args.max_model_len, args.enable_lora, args.api_key) == ("float32", 1000, True, ["a"])
    assert (args.served_model_name, args.enforce_eager, args.join_timeout) == (["m"], True, 5.0)


def test_the_model_may_be_a_flag() -> None:
    assert parse("--model", "m").model == "m"


def test_a_missing_model_is_an_error_that_shows_where_to_write_it() -> None:
    assert refusal("--dtype", "float32") == (
        "no model given: write it after -m spmd_serve, or as --model MODEL"
    )


def test_given_sizes_differ_from_defaults() -> None:
    assert set(parse("m").given_sizes.values()) == {None}
    assert parse("m", "-tp", "1", "--pipeline_parallel_size=2").given_sizes == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 2,
        "data_parallel_size": None,
    }


def test_vllm_flags_for_load_balancing_are_handled_here() -> None:
    """Each endpoint has its own configuration, so vLLM does not get the flags for all of them."""
    from spmd_serve.config.endpoints import Endpoint
    from spmd_serve.engine.config import apply_endpoint, apply_layout

    args = parse("m", "-dp", "4", "--data-parallel-external-lb", "--port", "8000,8001")
    assert args.port == (8000, 8001) and parse("m", "--port", "8000").port == 8000
    apply_layout(args, Layout(tp=1, pp=1, dp=4))
    assert (args.data_parallel_size, args.data_parallel_external_lb) == (4, False)
    apply_endpoint(args, Endpoint(1, rank=2, replicas=range(2, 4), place=0))
    assert args.data_parallel_size == 2


def test_coupled_replicas_use_vllms_hybrid_load_balancing(tiny_qwen3: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from spmd_serve.config.endpoints import Endpoint
    from spmd_serve.engine.config import apply_coupled_endpoint

    args = parse(str(tiny_qwen3), "-dp", "4")
    apply_coupled_endpoint(args, Endpoint(1, rank=2, replicas=range(2, 4), place=0), "10.0.0.1", 29551)
    given = AsyncEngineArgs.from_cli_args(args)
    assert given.data_parallel_hybrid_lb and given.data_parallel_size == 4
    assert (given.data_parallel_size_local, given.data_parallel_start_rank) == (2, 2)
    assert (given.data_parallel_address, given.data_parallel_rpc_port) == ("10.0.0.1", 29551)


def test_every_rejected_flag_exists_in_vllm() -> None:
    from spmd_serve.engine.config import make_parser

    known = {action.dest for action in make_parser()._actions}
    assert {*REFUSED, *TORCHRUN_OWNS} - known == set()
    assert {*REFUSED, *TORCHRUN_OWNS} == set(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_flags_that_contradict_torchrun_are_rejected(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    value = VALUES[name]
    text = refusal("m", flag, *([] if value is None else [value]))
    if name in TORCHRUN_OWNS:
        assert text == f"{flag} contradicts torchrun: write {TORCHRUN_OWNS[name]} instead"
    else:
        assert text == f"{flag} cannot be used under torchrun: {REFUSED[name]}"


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["m", "--no-such-flag"], "unrecognized arguments: --no-such-flag (--help lists the flags)"),
        (["m", "--max-num-seqs", "many"], "argument --max-num-seqs: "),
        (["m", "--enable-auto-tool-choice"], ""),
        (["m", "--data-parallel-backend", "ray"], "--data-parallel-backend: only mp makes sense here"),
        (["m", "--mm-processor-cache-type", "shm"], "--mm-processor-cache-type shm needs"),
    ],
)
def test_other_mistakes_are_one_line_errors(words: list[str], start: str) -> None:
    text = refusal(*words)
    assert text.startswith(start) and text


def test_flags_are_not_abbreviated() -> None:
    assert "--max-model" in refusal("m", "--max-model", "1")


def test_our_flags_come_first_in_the_help() -> None:
    from spmd_serve.engine.config import make_parser

    titles = [group.title for group in make_parser()._action_groups]
    assert titles.index("spmd_serve") < titles.index("Frontend")


def test_flag_values_hold_all_flags() -> None:
    from spmd_serve.engine.config import flag_values

    values = flag_values(parse("m", "--max-model-len", "64"))
    assert values["max_model_len"] == 64
    assert "join_timeout" in values and "given_sizes" not in values


class TestTheEnginesConfiguration:
    def build(self, model: Path, layout: Layout, *words: str) -> object:
        from spmd_serve.engine.config import apply_executor, apply_layout, engine_config

        args = parse(str(model), "--dtype", "float32", "--max-model-len", "128", "--enforce-eager", *words)
        apply_layout(args, layout)
        apply_executor(args)
        return engine_config(args)

    def test_pipeline_and_tensor_parallel_work_with_our_executor(self, tiny_qwen3: Path) -> None:
        from spmd_serve.engine.executor import TorchrunExecutor

        config = self.build(tiny_qwen3, Layout(tp=2, pp=2, dp=1))
        parallel = config.parallel_config  # type: ignore[attr-defined]
        assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == (2, 2)
        assert parallel.distributed_executor_backend is TorchrunExecutor

    def test_indivisible_heads_are_a_one_line_error(self, tiny_qwen3: Path) -> None:
        with pytest.raises(UsageError) as caught:
            self.build(tiny_qwen3, Layout(tp=3, pp=1, dp=1))
        assert "\n" not in str(caught.value)
        assert "must be divisible by tensor parallel size (3)" in str(caught.value)

    def test_a_directory_without_a_model_is_a_one_line_error(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as caught:
            self.build(tmp_path, Layout(tp=1, pp=1, dp=1))
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_an_unknown_parser_is_rejected_before_loading(tmp_path: Path) -> None:
    tools = ("some/model", "--enable-auto-tool-choice", "--tool-call-parser")
    assert parse(*tools, "hermes").tool_call_parser == "hermes"
    assert refusal(*tools, "herpes").startswith("--tool-call-parser herpes is unknown: vLLM has ")
    assert "deepseek_r1" in refusal("some/model", "--reasoning-parser", "thinker")
    missing = str(tmp_path / "parser.py")
    assert "does not exist on" in refusal("some/model", "--tool-parser-plugin", missing)


def test_a_parser_from_a_plugin_file_is_known(tmp_path: Path) -> None:
    plugin = tmp_path / "own_reasoning_parser_of_this_test.py"
    plugin.write_text(
        "from vllm.reasoning import ReasoningParser, ReasoningParserManager\n"
        "@ReasoningParserManager.register_module(['of_this_test'])\n"
        "class Own(ReasoningParser):\n    pass\n"
    )
    words = ("some/model", "--reasoning-parser", "of_this_test")
    assert "is unknown" in refusal(*words)
    assert parse(*words, "--reasoning-parser-plugin", str(plugin)).reasoning_parser == "of_this_test"


@pytest.mark.parametrize(
    "words", [("-dp", "auto"), ("--data-parallel-size=auto",), ("--data_parallel_size", "auto")]
)
def test_data_parallel_size_auto(words: tuple[str, ...]) -> None:
    assert parse("m", *words).given_sizes["data_parallel_size"] == "auto"
    assert parse("m", "-dp", "2").given_sizes["data_parallel_size"] == 2
    assert "data-parallel-size" in refusal("m", "-dp", "some")
