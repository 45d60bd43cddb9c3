"""PP=2 under one torchrun agent: stock vLLM's tokens, and two stages at work on different batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.waiting import Note, wait_until
from tests.support.endpoint import NAME, Endpoint
from tests.support.faults import kill_nine
from tests.support.job import Job, torchrun_job
from tests.support.stock import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ATTEMPTS = 5
EXTENSION = "tests.support.stage_clock.StageClock"


class Work(NamedTuple):
    """A stage's forward pass; `batch` counts the passes, and is the same number on both stages."""

    start: float
    end: float
    batch: int
    requests: frozenset[str]
    tokens: int

    @property
    def decodes(self) -> bool:
        """One token of each request; pieces of a long prompt may follow each other through the stages."""
        return self.tokens == len(self.requests)


@pytest.fixture(scope="module")
def job(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    log = tmp_path_factory.mktemp("pp") / "log"
    # Few tokens a batch, or all prompts that come together go into one: vLLM splits by this alone.
    flags = ["-pp=2", "-tp=1", "--max-num-batched-tokens=64", f"--worker-extension-cls={EXTENSION}"]
    with torchrun_job(tiny_qwen3, log, *flags, environ={"VLLM_SERVER_DEV_MODE": "1"}) as job:
        yield job


@pytest.fixture
def ours(job: Job) -> Endpoint:
    return job.endpoint


def stages(endpoint: Endpoint) -> list[list[Work]]:
    """What each stage has computed since clock_start, in order."""
    answers = endpoint.ask_ranks("clock_read")
    return [
        [
            Work(start, end, number, frozenset(requests), tokens)
            for number, (start, end, tokens, requests) in enumerate(notes)
        ]
        for notes in answers
    ]


def at_once(first: list[Work], second: list[Work]) -> list[tuple[Work, Work]]:
    """The pairs of different batches that both stages computed at the same moment."""
    return [
        (one, other)
        for one in first
        for other in second
        if one.batch != other.batch and one.start < other.end and other.start < one.end
    ]


def test_tokens_equal_stock(ours: Endpoint, stock_vllm: Endpoint) -> None:
    assert ours.greedy(PROMPTS) == stock_vllm.greedy(PROMPTS)


def test_twenty_prompts_at_once_equal_stock(ours: Endpoint, stock_vllm: Endpoint) -> None:
    prompts = [f"{number}: {PROMPTS[number % len(PROMPTS)]}" for number in range(20)]
    assert ours.greedy_together(prompts) == stock_vllm.greedy(prompts)


def test_a_stream_with_structured_output_equals_stock(ours: Endpoint, stock_vllm: Endpoint) -> None:
    def ask(endpoint: Endpoint) -> str:
        stream = endpoint.client.completions.create(
            model=NAME,
            prompt=PROMPTS[0],
            max_tokens=60,
            temperature=0,
            stream=True,
            extra_body={"structured_outputs": {"regex": r"[a-f]{12}-[0-9]{12}"}},
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    mine = ask(ours)
    assert mine == ask(stock_vllm) and len(mine) == 25


def test_both_stages_work_at_the_same_time_on_different_batches(ours: Endpoint, note: Note) -> None:
    ours.ask_ranks("clock_start")
    ours.greedy(PROMPTS[:1], 48)
    alone = stages(ours)
    # All requests may happen to get into one batch, and then stay together.
    for _ in range(ATTEMPTS):
        ours.ask_ranks("clock_start")
        ours.greedy_together(PROMPTS, 48)
        first, second = stages(ours)
        # The same batches in the same order on both stages, so that their numbers are comparable.
        assert [work.requests for work in first] == [work.requests for work in second]
        pairs = [pair for pair in at_once(first, second) if pair[0].decodes and pair[1].decodes]
        note(f"two stages at once: {len({one.batch for one, _ in pairs})} of {len(first)} batches")
        assert all(not one.requests & other.requests for one, other in pairs)
        if len(pairs) > 10:
            break
    assert len(pairs) > 10
    # The control: a single request has one batch at a time, which no two stages can compute at once.
    assert len(alone[0]) >= 48 and at_once(*alone) == []


def test_a_client_that_goes_away_frees_its_request_on_all_ranks(ours: Endpoint) -> None:
    stream = ours.client.completions.create(
        model=NAME, prompt=PROMPTS[0], max_tokens=900, temperature=0, stream=True
    )
    next(iter(stream))
    held: list[Any] = ours.ask_ranks("held_requests")
    assert [len(requests) for requests in held] == [1, 1] and held[0] == held[1]
    stream.close()
    wait_until(lambda: ours.ask_ranks("held_requests") == [[], []], 10, "both ranks to forget the request")
    assert ours.metric("vllm:kv_cache_usage_perc") == 0


def test_a_killed_rank_ends_the_whole_job(job: Job, ours: Endpoint, note: Note) -> None:
    footprint = job.footprint()
    pid = ours.pid("rank 1")
    kill_nine(pid)
    seconds = footprint.seconds_to_end()
    note(f"kill -9 of rank 1: the whole job is gone after {seconds:.1f} s")
    assert job.server.wait_exit(1) != 0
    assert f"rank 1 (pid {pid}" in job.summary() or "Signal 9 (SIGKILL)" in job.summary()
    footprint.assert_gone(1.0)
