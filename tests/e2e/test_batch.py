"""`spmd_serve batch` under torchrun: the answers of `vllm run-batch`, and an error for each bad line."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from spmd_serve.errors import ExitCode
from tests.support.batch_runs import DEADLINE_S, Bench, chat, comparable, row
from tests.support.job import ROOT, job_environ
from tests.support.stock import PROMPTS, SMALL_FLAGS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

Rows = Sequence[Mapping[str, Any]]
POOLING = ("--runner=pooling", "--convert=embed")

ROUND_ID = [
    *(chat(number, text) for number, text in enumerate(PROMPTS, 1)),
    chat(11, "two", n=2, temperature=1, seed=3),
    chat(12, "odds", logprobs=True, top_logprobs=2),
    chat(13, "too long " * 2000),
    chat(14, "streams are not for files", stream=True),
    chat(15, "no such model", model="another"),
    row(16, "/v1/nothing", {"messages": []}),
    row(17, "/v1/embeddings", {"input": "a generating model embeds nothing"}),
    row(18, "/v1/other/completions", {"messages": [{"role": "user", "content": "no such URL"}]}),
]
COMPLETION = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
COMPLETIONS = [
    row(30, "/v1/completions", COMPLETION),
    row(31, "/v1/completions", {**COMPLETION, "prompt": list(PROMPTS[:3])}),
]
"""run-batch has no such endpoint."""
BAD: dict[bytes, str] = {
    b'{"custom_id": "torn", "method": "POS': "not JSON",
    b"\xff\xfe": "not JSON",
    b"[1, 2]": "not a JSON object but a list",
    json.dumps({"method": "POST", "url": "/v1/x", "body": {}}).encode(): "custom_id is missing",
    json.dumps(chat(1, "again")).encode(): "custom_id 'id-1' was used before, on line 1",
    json.dumps({**chat(40, "x"), "body": "text"}).encode(): "body must be a JSON object, not a text",
    json.dumps(row(41, "/v1/chat/completions", {"messages": 5})).encode(): "body: ",
    json.dumps(chat(42, "negative", max_tokens=-1)).encode(): "max_tokens",
}
"""Lines on which run-batch stops altogether, or that it answers twice; and what our error says."""

_TEXTS = list(PROMPTS[:4])
POOLED = [
    *(row(number, "/v1/embeddings", {"input": text}) for number, text in enumerate(_TEXTS, 1)),
    row(11, "/v1/embeddings", {"input": _TEXTS}),
    row(12, "/v1/embeddings", {"input": _TEXTS[0], "encoding_format": "base64"}),
    row(13, "/v1/embeddings", {"input": "too long " * 2000}),
    row(14, "/score", {"queries": _TEXTS[0], "documents": _TEXTS[1:]}),
    row(15, "/v1/rerank", {"query": _TEXTS[0], "documents": _TEXTS[1:]}),
    chat(16, "an embedding model says nothing"),
]


def run_batch(
    rows: Sequence[Mapping[str, Any]], folder: Path, model: Path, *flags: str
) -> dict[str, dict[str, Any]]:
    """vLLM's own answers, by custom_id."""
    theirs, out = folder / "theirs.jsonl", folder / "theirs.out"
    theirs.write_text("".join(json.dumps(line) + "\n" for line in rows))
    entry = "vllm.entrypoints.launchers.run_batch"
    command = [sys.executable, "-m", entry, f"-i={theirs}", f"-o={out}", f"--model={model}"]
    done = subprocess.run(
        [*command, *SMALL_FLAGS, *flags],
        cwd=ROOT,
        env=job_environ(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}


def test_generation_is_that_of_run_batch_and_bad_lines_are_errors(tiny_qwen3: Path, tmp_path: Path) -> None:
    expected = run_batch(ROUND_ID, tmp_path, tiny_qwen3)
    bench = Bench(tmp_path, tiny_qwen3)
    good = [*ROUND_ID, *COMPLETIONS]
    bench.put([*good, *BAD])
    ended = bench.run("-tp=2", "--ordered")

    assert ended.code == 1, ended.text
    cause = ended.text[ended.text.rindex("Root Cause (first observed failure)") :]
    assert f"exitcode  : {ExitCode.LINES_FAILED:d}" in cause
    assert f"all lines are in {bench.output}, some of them with an error" in cause
    answers = bench.by_id()
    for name, line in expected.items():
        assert comparable(answers[name]) == comparable(line), name
    one, several = (answers[extra["custom_id"]]["response"]["body"]["choices"] for extra in COMPLETIONS)
    assert one[0]["text"] == several[0]["text"] != ""

    lines = bench.lines()
    assert [line["custom_id"] for line in lines[: len(good)]] == [line["custom_id"] for line in good]
    for number, (line, reason) in enumerate(
        zip(lines[len(good) :], BAD.values(), strict=True), len(good) + 1
    ):
        error = json.dumps(line["error"])
        assert f"line {number}: " in error and reason in error, line

    before = bench.output.read_bytes()
    again = bench.run("-tp=2", "--ordered", max_restarts=3)
    assert again.code == 0, "with restarts left torchrun would begin the finished run again"
    assert "torchrun would start the finished run again" in again.text
    assert "Loading" not in again.text, "nothing is to be asked: no model is loaded"
    assert again.text.count("some of them with an error") == 1
    assert bench.output.read_bytes() == before


# By hand: another start of both, and all ways of pooling are compared in test_pooling.py.
@pytest.mark.by_hand
@pytest.mark.parametrize("sizes", ["-tp=2", "-dp=2"])
def test_pooling_is_that_of_run_batch(sizes: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    expected = run_batch(POOLED, tmp_path, tiny_qwen3, *POOLING)
    bench = Bench(tmp_path, tiny_qwen3, *POOLING)
    bench.put(POOLED)
    ended = bench.run(sizes)
    assert ended.code == 1, ended.text
    assert {name: comparable(line) for name, line in bench.by_id().items()} == {
        name: comparable(line) for name, line in expected.items()
    }


# By hand: two more starts, and the ways of files are tested without an engine.
@pytest.mark.by_hand
@pytest.mark.parametrize("sizes", ["-dp=2", "-pp=2"])
def test_plain_prompts_through_pipes(sizes: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tiny_qwen3)
    flags = ("--prompts=-", "-o", "-", "--ordered", "--max-tokens=24", "--temperature=0")
    done = subprocess.run(
        bench.server(sizes, *flags).command,
        input="".join(f"{prompt}\n" for prompt in PROMPTS).encode(),
        capture_output=True,
        env=job_environ(),
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == list(PROMPTS)
    assert all(line["error"] is None and line["usage"]["completion_tokens"] == 24 for line in lines)
