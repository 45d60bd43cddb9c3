"""Scripts under torchrun: one launch per layout, whose script makes many calls and writes what it found."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.server import Server
from harness.torchrun import torchrun_command
from tests.support.footprint import Footprint
from tests.support.job import ROOT, job_environ
from tests.support.stock import PROMPTS, Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 240.0
MODULE = "tests.support.offline_script"


@dataclass(frozen=True)
class Ran:
    """How a script ended, what it printed, and what each rank found."""

    code: int
    text: str
    found: list[dict[str, Any]]

    @property
    def own_lines(self) -> list[str]:
        """What spmd_serve itself has printed."""
        return [line for line in self.text.splitlines() if line.startswith("spmd_serve")]


def run(command: list[str], out: Path) -> Ran:
    """Run a script to its end; nothing of it may be left then."""
    out.mkdir(parents=True, exist_ok=True)
    server = Server(command, out / "log", environ=job_environ())
    with server:
        server.wait_line("script of rank|Error|started|Generated text|step 0", DEADLINE_S)
        footprint = Footprint.of(server.pid)
        code = server.wait_exit(DEADLINE_S)
        footprint.assert_gone(5.0)
    files = sorted(out.glob("rank*.json"))
    return Ran(code, server.text(), [json.loads(file.read_text()) for file in files])


by_hand = pytest.mark.by_hand
"""For time's sake: in CI all kinds of calls run on TP 2, prompts are spread on DP 2, and an example runs."""

Launch = Callable[..., Ran]


@pytest.fixture(scope="module")
def launch(tiny_qwen3: Path, tiny_lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Run one of the scripts of `tests.support.offline_script`, each once for all tests."""
    done: dict[str, Ran] = {}

    def start(what: str, ranks: int) -> Ran:
        if what not in done:
            out = tmp_path_factory.mktemp(what)
            arguments = [what, str(out), str(tiny_qwen3), str(tiny_lora)]
            command = (
                torchrun_command(ranks, arguments, module=MODULE)
                if ranks
                else [sys.executable, "-m", MODULE, *arguments]
            )
            done[what] = run(command, out)
        return done[what]

    return start


@pytest.fixture(scope="module")
def greedy(launch: Launch) -> list[list[int]]:
    """The answers of vLLM's own LLM."""
    (stock,) = launch("stock", 0).found
    answers: list[list[int]] = stock["answers"]["greedy"]
    return answers


def assert_clean(ran: Ran, ranks: int) -> None:
    """A normal end: exit code 0, nothing left over, nothing to complain about."""
    assert ran.code == 0, ran.text
    assert len(ran.found) == ranks
    assert not [line for line in ran.own_lines if "failed" in line or "SIGKILL" in line]
    for word in ("leaked", "Traceback", "core dumped", "terminate called", "resource_tracker"):
        assert word not in ran.text.replace("ERROR", ""), word


class TestTensorParallel:
    @pytest.fixture
    def ran(self, launch: Launch) -> Ran:
        return launch("tensor_parallel", 2)

    def test_every_answer_is_stock_vllms_on_every_rank(self, ran: Ran, launch: Launch) -> None:
        (expected,) = launch("stock", 0).found
        for found in ran.found:
            assert found["answers"] == expected["answers"]

    def test_the_answers_differ_where_they_should(self, ran: Ran) -> None:
        answers = ran.found[1]["answers"]
        assert answers["greedy"] == answers["again"] != answers["lora"]
        assert "VLLMValidationError" in answers["too long"]

    def test_a_normal_end(self, ran: Ran) -> None:
        assert ran.code == 0, ran.text
        assert "leaked" not in ran.text and "terminate called" not in ran.text
        assert not [line for line in ran.own_lines if "failed" in line or "SIGKILL" in line]

    def test_worker_methods_run_on_every_shard(self, ran: Ran) -> None:
        for found in ran.found:
            assert found["ranks"] == found["engine"] == [0, 1]
            assert found["taken"] in ([47, 47], None)

    def test_a_failing_shard_is_an_error_on_all_ranks_and_the_next_call_is_right(self, ran: Ran) -> None:
        for found in ran.found:
            assert "rank 0 fails" in found["one fails"] and "rank 1 fails" in found["other fails"]
            assert "no_such_method" in found["unknown"]
            assert found["none fails"] == ["fine", "fine"]

    def test_each_shard_runs_what_its_own_rank_has_passed(self, ran: Ran) -> None:
        for found in ran.found:
            assert found["function"] == [[0, 10], [1, 11]]
            assert found["own tensor"] == [2.0, 4.0]
            assert found["model"] == [[0, 160, 128], [1, 160, 128]]

    def test_each_rank_reaches_its_own_shard(self, ran: Ran) -> None:
        assert [found["head"] for found in ran.found] == [[160, 128], [160, 128]]

    def test_the_scripts_own_process_group_stays_usable(self, ran: Ran) -> None:
        assert all(found["own group"] == [3, 2] for found in ran.found)

    def test_after_its_end_an_llm_says_so(self, ran: Ran) -> None:
        for found in ran.found:
            assert found["closed"] == "UsageError: generate(): this LLM is closed"
            assert found["shard"] is True
            assert "is open" in found["another"]

    def test_outputs_on_the_driver_alone(self, ran: Ran) -> None:
        assert [found["on driver"] for found in ran.found] == [ran.found[0]["answers"]["greedy"], None]

    def test_new_weights_are_at_work(self, ran: Ran, launch: Launch) -> None:
        (expected,) = launch("stock", 0).found
        assert ran.found[0]["trained"] == expected["trained"] != ran.found[0]["answers"]["greedy"]

    def test_the_process_stays_the_scripts(self, ran: Ran) -> None:
        assert all(found["name"].startswith("python") for found in ran.found)
        assert "\nscript of rank 0 is done\n" in ran.text  # no prefix of vLLM's before what it prints
        assert ran.found[1]["repr"].endswith("rank 1 of 2)")
        assert ran.found[1]["world"] == [2, 2]


@by_hand
class TestPipelineParallel:
    def test_tokens_equal_stock_and_our_group_is_the_scripts(
        self, launch: Launch, greedy: list[list[int]]
    ) -> None:
        ran = launch("pipeline_parallel", 2)
        assert_clean(ran, 2)
        for rank, found in enumerate(ran.found):
            assert found["greedy"] == greedy
            assert found["twenty"] == ran.found[0]["twenty"] and len(found["twenty"]) == 20
            assert found["group"] == [3, 2, rank]
            assert found["later"] == 6


class TestDataParallel:
    @pytest.fixture
    def ran(self, launch: Launch) -> Ran:
        return launch("data_parallel", 2)

    def test_spread_prompts_come_back_in_order_on_all_ranks(self, ran: Ran, greedy: list[list[int]]) -> None:
        short = [tokens[:8] for tokens in greedy]
        for found in ran.found:
            assert found["greedy"] == greedy
            assert found["lengths"] == list(range(1, len(PROMPTS) + 1))
            assert found["single"] == [short[1]]
            assert found["queued"] == short[:5]
            assert found["after"] == short[:2]
            assert found["heads"] == [[320, 128], [320, 128]]
            assert "VLLMValidationError" in found["too long"]
            assert found["world"] == [2, 1]

    def test_scripts_for_the_external_launcher_give_each_replica_its_own(
        self, ran: Ran, greedy: list[list[int]]
    ) -> None:
        for rank, found in enumerate(ran.found):
            assert found["own prompts"] == [rank, 2, greedy[rank::2]]
        assert ran.found[1]["extra"] == [greedy[0][:8]]
        assert sum("external_launcher" in line for line in ran.own_lines) == 1

    def test_a_normal_end(self, ran: Ran) -> None:
        assert_clean(ran, 2)


@by_hand
def test_replicas_of_a_mixture_of_experts(tiny_moe: Path, tmp_path: Path, reference: Reference) -> None:
    ran = run(torchrun_command(2, ["mixture", str(tmp_path), str(tiny_moe), ""], module=MODULE), tmp_path)
    assert_clean(ran, 2)
    greedy = [answer.tokens for answer in reference.greedy(tiny_moe)]
    for found in ran.found:
        assert found["greedy"] == greedy
        assert found["single"] == [greedy[1][:8]]
        assert found["beams"] == 2
        assert "VLLMValidationError" in found["too long"]
    assert [found["own prompts"] for found in ran.found] == [greedy[:3], greedy[3:]]


@by_hand
def test_without_torchrun(launch: Launch, greedy: list[list[int]]) -> None:
    ran = launch("alone", 0)
    assert_clean(ran, 1)
    assert ran.found[0]["greedy"] == greedy


@by_hand
def test_embeddings_and_scores(launch: Launch) -> None:
    ran, expected = launch("embed", 2), launch("stock_embed", 0)
    assert_clean(ran, 2)
    for found in ran.found:
        assert found["generate"] == expected.found[0]["generate"]
        assert found["scores"] == pytest.approx(expected.found[0]["scores"], abs=1e-4)
        for mine, theirs in zip(found["embeddings"], expected.found[0]["embeddings"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        pytest.param("order", "out of step at call 3: rank 0 on {host}: calls generate(", marks=by_hand),
        pytest.param(
            "arguments",
            "call 3 of generate(): prompts differs: list of 1 on rank 0 on {host}; list of 2 on rank 1",
            marks=by_hand,
        ),
        pytest.param("one_calls", "rank 1 on {host}: calls generate(prompts=list of 1", marks=by_hand),
        pytest.param("one_ends", "rank 1 on {host}: has ended its script", marks=by_hand),
        pytest.param("raises", "): ValueError: in the script of rank 1", marks=by_hand),
        pytest.param("raises_inside", "): KeyError: 'inside with'", marks=by_hand),
    ],
)
def test_what_goes_wrong_in_a_script_ends_it_with_that_cause(
    what: str, text: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    command = torchrun_command(2, [what, str(tiny_qwen3)], module="tests.support.offline_mistakes")
    ran = run(command, tmp_path)
    assert ran.code == 1
    assert text.format(host=os.uname().nodename) in ran.own_lines[-1]
    assert ran.own_lines[-1].startswith("spmd_serve watcher: the job has failed: rank ")
    assert "is done" not in ran.text
    assert "SIGKILL" not in ran.text


class TestExamples:
    """launch/examples run as they are."""

    def example(self, name: str, ranks: int, out: Path, *arguments: str) -> Ran:
        command = torchrun_command(ranks, [], module=name)[:-2]
        script = str(ROOT / "launch" / "examples" / name)
        return run([*command, script, *arguments, "--max-model-len=1024", "--enforce-eager"], out)

    def test_plain(self, tiny_qwen3: Path, tmp_path: Path, greedy: list[list[int]]) -> None:
        ran = self.example("torchrun_example.py", 2, tmp_path, str(tiny_qwen3))
        assert ran.code == 0, ran.text
        assert ran.text.count("Generated text:") == 4

    @by_hand
    def test_data_parallel(self, tiny_qwen3: Path, tmp_path: Path) -> None:
        ran = self.example("torchrun_dp_example.py", 2, tmp_path, str(tiny_qwen3))
        assert ran.code == 0, ran.text
        assert ran.text.count("DP Rank: 0") == ran.text.count("DP Rank: 1") == 2

    @by_hand
    def test_rlhf(self, tiny_qwen3: Path, tmp_path: Path) -> None:
        ran = self.example("rlhf_loop.py", 2, tmp_path, str(tiny_qwen3))
        assert ran.code == 0, ran.text
        assert ran.text.count("step 0:") == ran.text.count("step 1:") == 1
        assert "new weights are at work" in ran.text
