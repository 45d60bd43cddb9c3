"""Answers from vLLM's endpoints; tests/e2e/test_batch.py compares them with those of `vllm run-batch`."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_serve.batch import BatchLine, BatchOptions
from spmd_serve.batch.handlers import Endpoints, window_for
from spmd_serve.batch.loop import WINDOW
from spmd_serve.batch.prepare import OPERATIONAL, OPERATIONAL_PREFIXES, answer_flags
from spmd_serve.batch.request_lines import error_output
from spmd_serve.errors import PeerLost
from tests.support import stock

DEADLINE_S = 280.0


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


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_an_aborted_answer_is_no_answer(url: str) -> None:
    """An engine core that got SIGTERM answers new requests with status 200, "abort" and no text."""
    reasons: list[str] = []

    class Aborting(Endpoints):
        async def _handle(self, line: BatchLine) -> dict[str, Any]:
            choices = [{"text": "", "finish_reason": reason} for reason in reasons]
            return {"response": {"status_code": 200, "body": {"choices": choices}}, "error": None}

        _complete = _handle

    def answer() -> dict[str, Any]:
        endpoints = Aborting(SimpleNamespace(vllm_config=None, errored=False), {}, None)
        return asyncio.run(endpoints.answer(BatchLine(1, "a", url, {})))

    reasons[:] = ["stop", "length"]
    assert len(answer()["response"]["body"]["choices"]) == 2
    reasons[:] = ["stop", "abort"]
    with pytest.raises(PeerLost, match="told to end: what was finished is kept, run the same command again"):
        answer()


def environ() -> dict[str, str]:
    return {**os.environ, **stock.ENVIRON, "OMP_NUM_THREADS": "1"}


def run(command: Sequence[str]) -> tuple[int, str]:
    root = Path(__file__).parents[3]
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


@pytest.mark.vllm
def test_flags_fit_into_vllms_parser() -> None:
    code, said = run(["tests.vllm.batch.test_handlers"])
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


def check_random_ids() -> None:
    """The random engine ids of transfer configurations do not keep a batch from going on."""
    from spmd_serve.engine.config import make_parser

    parser = make_parser(BatchOptions.add_to)
    defaults = {action.dest: action.default for action in parser._actions}

    def shown(flag: str, role: str, value: str) -> str:
        words = ["a-model", "-i=in", "-o=out", flag, f'{{"{role}": "{role.removesuffix("_role")}_{value}"}}']
        return answer_flags(vars(parser.parse_args(words)), defaults)[flag]

    for flag, role in (("--kv-transfer-config", "kv_role"), ("--ec-transfer-config", "ec_role")):
        first, second, other = (shown(flag, role, value) for value in ("producer", "producer", "consumer"))
        assert first == second != other


if __name__ == "__main__":
    check_flags()
    check_random_ids()
