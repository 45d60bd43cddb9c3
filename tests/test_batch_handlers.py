"""Answers from vLLM's endpoints: those of `vllm run-batch` on the same file, and completions besides.

As a program (``python -m tests.test_batch_handlers IN OUT FLAGS…``) it is a batch on stock vLLM's engine,
without torchrun.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_serve.batch import BatchLine, BatchOptions, prepare, run_batch_with_engine
from spmd_serve.batch.fingerprint import OPERATIONAL, OPERATIONAL_PREFIXES, answer_flags
from spmd_serve.batch.handlers import Endpoints, window_for
from spmd_serve.batch.lines import error_output
from spmd_serve.batch.loop import WINDOW
from spmd_serve.errors import ExitCode, PeerLost
from tests.support import stock

DEADLINE_S = 280.0
UNLIKE = frozenset({"id", "created", "request_id"})
"""Fields that are new in every run."""


def window(max_num_seqs: int, dp: int) -> int:
    scheduler = SimpleNamespace(max_num_seqs=max_num_seqs)
    return window_for(
        SimpleNamespace(scheduler_config=scheduler, parallel_config=SimpleNamespace(data_parallel_size=dp))
    )


def test_the_window_keeps_all_replicas_busy() -> None:
    assert window(8, 1) == WINDOW
    assert window(1024, 4) == 8192


@pytest.mark.parametrize("errored", [False, True])
def test_a_dead_engine_is_told_from_a_failed_request(errored: bool) -> None:
    class Failing(Endpoints):
        async def _handle(self, line: BatchLine) -> dict[str, Any]:
            return error_output(line.custom_id, "no", 500)

    engine = SimpleNamespace(vllm_config=None, errored=errored)
    answering = Failing(engine, {}, None).answer(BatchLine(1, "a", "/v1/x", {}))
    if errored:
        with pytest.raises(PeerLost, match="the engine is gone"):
            asyncio.run(answering)
    else:
        assert asyncio.run(answering)["error"] == "no"


def chat(number: int, content: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 0, **more}
    return row(number, "/v1/chat/completions", body)


def row(number: int, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}


def environ() -> dict[str, str]:
    return {**os.environ, **stock.ENVIRON, "OMP_NUM_THREADS": "1"}


def run(command: Sequence[str]) -> tuple[int, str]:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stdout[-6000:]


def both(
    folder: Path, rows: Sequence[Mapping[str, Any]], only_ours: Sequence[Mapping[str, Any]], flags: list[str]
) -> None:
    """Answer `rows` with vLLM's run-batch and with ours, and compare; ours must answer `only_ours` too."""
    theirs_in, ours_in = folder / "theirs.jsonl", folder / "ours.jsonl"
    theirs_in.write_text("".join(json.dumps(line) + "\n" for line in rows))
    ours_in.write_text("".join(json.dumps(line) + "\n" for line in [*rows, *only_ours]))
    theirs_out, ours_out = folder / "theirs.out", folder / "ours.out"
    code, said = run(
        ["vllm.entrypoints.launchers.run_batch", "-i", str(theirs_in), "-o", str(theirs_out), *flags]
    )
    assert code == 0, said
    code, said = run(["tests.test_batch_handlers", str(ours_in), str(ours_out), *flags])
    assert code == ExitCode.LINES_FAILED, said
    theirs, ours = by_id(theirs_out), by_id(ours_out)
    for name, line in theirs.items():
        assert comparable(ours[name]) == comparable(line), name
    for extra in only_ours:
        assert ours[extra["custom_id"]]["error"] is None, ours[extra["custom_id"]]
    assert set(ours) == {line["custom_id"] for line in [*rows, *only_ours]}


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def comparable(value: Any) -> Any:
    """Without what is new in every run, without our ``line N:``, and without the list of endpoints (ours has
    more).
    """
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items() if name not in UNLIKE}
    if isinstance(value, list):
        return [comparable(part) for part in value]
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-3, abs=1e-4)
    if isinstance(value, str):
        return re.sub(r"^line \d+: ", "", value).partition(" Supported endpoints:")[0]
    return value


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generation_is_that_of_run_batch(tmp_path: Path, tiny_qwen3: Path) -> None:
    rows = [chat(number, text) for number, text in enumerate(stock.PROMPTS, 1)]
    rows += [
        chat(11, "two", n=2, temperature=1, seed=3),
        chat(12, "odds", logprobs=True, top_logprobs=2),
        chat(13, "too long " * 2000),
        chat(14, "streams are not for files", stream=True),
        chat(15, "no such model", model="another"),
        row(16, "/v1/nothing", {"messages": []}),
        row(17, "/v1/embeddings", {"input": "a generating model embeds nothing"}),
        row(18, "/v1/other/completions", {"messages": [{"role": "user", "content": "no such URL"}]}),
    ]
    prompt = {"prompt": stock.PROMPTS[0], "max_tokens": 24, "temperature": 0}
    several = {**prompt, "prompt": list(stock.PROMPTS[:3])}
    flags = ["--model", str(tiny_qwen3), *stock.SMALL_FLAGS]
    both(tmp_path, rows, [row(30, "/v1/completions", prompt), row(31, "/v1/completions", several)], flags)
    completions = by_id(tmp_path / "ours.out")
    (greedy,) = completions["id-30"]["response"]["body"]["choices"]
    assert greedy["text"] == completions["id-31"]["response"]["body"]["choices"][0]["text"] != ""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pooling_is_that_of_run_batch(tmp_path: Path, tiny_qwen3: Path) -> None:
    texts = list(stock.PROMPTS[:4])
    rows = [row(number, "/v1/embeddings", {"input": text}) for number, text in enumerate(texts, 1)]
    rows += [
        row(11, "/v1/embeddings", {"input": texts}),
        row(12, "/v1/embeddings", {"input": texts[0], "encoding_format": "base64"}),
        row(13, "/v1/embeddings", {"input": "too long " * 2000}),
        row(14, "/score", {"queries": texts[0], "documents": texts[1:]}),
        row(15, "/v1/rerank", {"query": texts[0], "documents": texts[1:]}),
        chat(16, "an embedding model says nothing"),
    ]
    flags = ["--model", str(tiny_qwen3), *stock.SMALL_FLAGS, "--runner", "pooling", "--convert", "embed"]
    both(tmp_path, rows, [], flags)


@pytest.mark.vllm
def test_flags_fit_into_vllms_parser() -> None:
    code, said = run(["tests.test_batch_handlers", "flags"])
    assert code == 0, said


def check_flags() -> None:
    """No flag of ours is one of vLLM's, and the names of those that decide no answer are still vLLM's."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    theirs = {action.dest for action in parser._actions}
    BatchOptions.add_to(parser)
    ours = {action.dest for action in parser._actions} - theirs
    assert len(ours) == len(BatchOptions.__dataclass_fields__)
    assert theirs >= OPERATIONAL, OPERATIONAL - theirs
    assert [
        prefix for prefix in OPERATIONAL_PREFIXES if not any(name.startswith(prefix) for name in theirs)
    ] == []
    words = [
        "-i",
        "in",
        "-o",
        "out",
        "--model",
        "m",
        "--seed",
        "7",
        "-tp",
        "8",
        "-dp",
        "2",
        "--max-num-seqs",
        "9",
    ]
    args = parser.parse_args(words)
    assert BatchOptions.from_namespace(args).source == "in"
    defaults = {action.dest: action.default for action in parser._actions}
    assert answer_flags(vars(args), defaults) == {"--model": "m", "--seed": "7"}


def main(source: str, out: str, *flags: str) -> ExitCode:
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    BatchOptions.add_to(parser)
    args = parser.parse_args([*flags, "-i", source, "-o", out])
    options = BatchOptions.from_namespace(args)
    prepared = prepare(options)

    async def whole() -> ExitCode:
        async with build_async_engine_client(args) as engine_client:
            return await run_batch_with_engine(engine_client, args, options, prepared=prepared)

    return asyncio.run(whole())


if __name__ == "__main__":
    if sys.argv[1:] == ["flags"]:
        check_flags()
    else:
        sys.exit(main(*sys.argv[1:]))
