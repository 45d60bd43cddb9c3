"""The layouts of a multi-node test plan: the same tokens as stock vLLM's from every endpoint.

torchrun agents on this machine stand for nodes. The plan's own sizes need up to 8 ranks, some 20 GB and
several minutes each on two cores, so they are by hand (last seen: docs/benchmarks.md); CI runs the same
shapes at half the size.
"""

import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.server import answers
from harness.waiting import Note, wait_until
from tests.support.agents import AgentsJob, agents_job
from tests.support.crowd import ENDLESS, ROOM
from tests.support.endpoint import NAME, Endpoint
from tests.support.faults import kill_nine
from tests.support.job import HTTP_PORT, hosts_job
from tests.support.netns import Hosts
from tests.support.stock import PROMPTS, Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ASLEEP_S = 2.0  # in which two awake replicas have long answered


@dataclass(frozen=True)
class Plan:
    """A layout, and how many endpoints it makes."""

    lb: str
    dp: int
    pp: int
    tp: int
    nodes: int

    @property
    def endpoints(self) -> int:
        per_node = {"internal": self.dp, "external": 1, "hybrid": self.dp // self.nodes}
        return self.dp // per_node[self.lb]

    @property
    def ranks_per_node(self) -> int:
        return self.dp * self.pp * self.tp // self.nodes

    @property
    def flags(self) -> list[str]:
        return [f"-dp={self.dp}", f"-pp={self.pp}", f"-tp={self.tp}", f"--lb={self.lb}"]

    def __str__(self) -> str:
        return f"{self.lb}-dp{self.dp}-pp{self.pp}-tp{self.tp}-on-{self.nodes}"

    def job(self, model: Path, log: Path, *flags: str, environ: Mapping[str, str] | None = None) -> AgentsJob:
        return agents_job(
            model,
            log,
            *self.flags,
            "--api-server-count=1",
            *flags,
            nodes=self.nodes,
            ranks=self.ranks_per_node,
            endpoints=self.endpoints,
            environ=environ,
        )


FULL = [
    Plan("internal", dp=1, pp=1, tp=4, nodes=2),
    Plan("internal", dp=1, pp=2, tp=2, nodes=2),
    Plan("external", dp=2, pp=1, tp=4, nodes=4),
    Plan("internal", dp=2, pp=1, tp=4, nodes=4),
    Plan("internal", dp=4, pp=1, tp=2, nodes=4),
    Plan("external", dp=4, pp=1, tp=2, nodes=4),
    Plan("hybrid", dp=4, pp=1, tp=2, nodes=2),
    Plan("internal", dp=2, pp=2, tp=2, nodes=8),
]

HALF = [
    Plan("internal", dp=2, pp=1, tp=2, nodes=4),
    Plan("internal", dp=4, pp=1, tp=1, nodes=4),
    Plan("external", dp=4, pp=1, tp=1, nodes=4),
]
"""Those of which no other test of CI has the shape at half the size."""


@pytest.fixture(scope="session")
def expected(reference: Reference, tiny_qwen3: Path) -> list[list[int]]:
    return [answer.tokens for answer in reference.greedy(tiny_qwen3)]


def generated(endpoint: Endpoint) -> dict[str, float]:
    """How many tokens each engine behind the endpoint has generated."""
    return endpoint.by_engine("vllm:generation_tokens_total")


def check_tokens(job: AgentsJob, expected: list[list[int]]) -> None:
    """All endpoints at once, every prompt by a client of its own."""
    with ThreadPoolExecutor(len(job.endpoints)) as clients:
        for tokens in clients.map(lambda endpoint: endpoint.greedy_together(PROMPTS), job.endpoints):
            assert tokens == expected


@pytest.mark.by_hand  # see the head of this file
@pytest.mark.parametrize("plan", FULL, ids=str)
def test_the_plan_at_full_size(
    plan: Plan, tiny_qwen3: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    with plan.job(tiny_qwen3, tmp_path).running(600.0) as job:
        check_tokens(job, expected)
        footprint = job.footprint()
    footprint.assert_gone(1.0)


@pytest.mark.parametrize("plan", HALF, ids=str)
def test_the_plan_at_half_size(
    plan: Plan, tiny_qwen3: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    with plan.job(tiny_qwen3, tmp_path).running() as job:
        check_tokens(job, expected)


@pytest.fixture(scope="class")
def hybrid(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentsJob]:
    plan = Plan("hybrid", dp=4, pp=1, tp=1, nodes=2)
    with plan.job(tiny_qwen3, tmp_path_factory.mktemp("hybrid"), ROOM).running() as job:
        yield job


@pytest.fixture(scope="class")
def external(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentsJob]:
    plan = Plan("external", dp=2, pp=1, tp=2, nodes=4)
    with plan.job(tiny_qwen3, tmp_path_factory.mktemp("external")).running() as job:
        yield job


class TestHybrid:
    """Two nodes with two replicas each: two endpoints."""

    def test_every_endpoint_gives_stocks_tokens(self, hybrid: AgentsJob, expected: list[list[int]]) -> None:
        check_tokens(hybrid, expected)

    def test_load_is_spread_over_all_replicas(self, hybrid: AgentsJob) -> None:
        before = [generated(endpoint) for endpoint in hybrid.endpoints]
        assert [set(engines) for engines in before] == [{"0", "1"}, {"2", "3"}]
        for endpoint in hybrid.endpoints:
            endpoint.greedy_together([f"{number} bottles" for number in range(32)], 24)
        for endpoint, engines in zip(hybrid.endpoints, before, strict=True):
            after = generated(endpoint)
            assert all(after[engine] - engines[engine] >= 4 * 24 for engine in after), (engines, after)

    def test_a_long_request_blocks_nobody(self, hybrid: AgentsJob) -> None:
        endpoint = hybrid.endpoints[1]
        long = endpoint.client.completions.create(
            model=NAME,
            prompt="once",
            max_tokens=ENDLESS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(long))
        for number in range(4):
            endpoint.greedy([f"{number} is short"], 4)
        assert endpoint.metric("vllm:num_requests_running") >= 1
        long.close()
        wait_until(lambda: endpoint.metric("vllm:num_requests_running") == 0, 10, "the request to end")

    def test_each_endpoint_is_a_whole_server(self, hybrid: AgentsJob) -> None:
        for endpoint in hybrid.endpoints:
            assert endpoint.call("/health")[0] == 200
            status, models = endpoint.call("/v1/models")
            assert status == 200 and [model["id"] for model in models["data"]] == ["tiny"]
        table = re.findall(r"^(http://\S+)  \((replicas .*)\)$", hybrid.text(), re.MULTILINE)
        urls = [endpoint.url for endpoint in hybrid.endpoints]
        assert table == list(zip(urls, ["replicas 0-1", "replicas 2-3"], strict=True))

    def test_sigterm_at_one_rank_lets_every_endpoint_finish(self, hybrid: AgentsJob) -> None:
        footprint = hybrid.footprint()
        rank = hybrid.endpoints[0].pid("rank 3")

        def all_answer() -> bool:
            return all(one.metric("vllm:num_requests_running") == 1 for one in hybrid.endpoints)

        with ThreadPoolExecutor(2) as clients:
            answers = [clients.submit(one.greedy, ["to the end"], 600) for one in hybrid.endpoints]
            wait_until(all_answer, 30, "both endpoints to answer")
            os.kill(rank, signal.SIGTERM)
            assert [len(answer.result()[0]) for answer in answers] == [600, 600]
        for server in hybrid.servers:
            assert server.wait_exit(30) == 0, server.tail()
        footprint.assert_gone(1.0)


class TestExternal:
    """Four nodes of one rank, two to a replica: two endpoints, on the first and the third."""

    def test_every_endpoint_gives_stocks_tokens(self, external: AgentsJob, expected: list[list[int]]) -> None:
        check_tokens(external, expected)
        assert [set(generated(endpoint)) for endpoint in external.endpoints] == [{"0"}, {"1"}]

    def test_a_killed_rank_ends_all_endpoints(self, external: AgentsJob, note: Note) -> None:
        footprint = external.footprint()
        members = external.endpoints[0].members()
        kill_nine(next(int(member["pid"]) for member in members if member["name"] == "rank 3"))
        seconds = footprint.seconds_to_end()
        note(f"kill -9 of a rank of replica 1: both replicas are gone after {seconds:.1f} s")
        footprint.assert_gone(1.0)
        causes = re.findall(r"the job has failed: (.*)", external.text())
        # A watcher drops its last line where nobody reads at that moment.
        assert 3 <= len(causes) <= 4 and all("rank 3 (pid" in cause for cause in causes)


@pytest.fixture(scope="class")
def internal(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentsJob]:
    plan = Plan("internal", dp=2, pp=2, tp=1, nodes=4)
    flags = ["--enable-lora", "--max-lora-rank=8"]
    environ = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    job = plan.job(tiny_qwen3, tmp_path_factory.mktemp("internal"), *flags, environ=environ)
    with job.running() as running:
        yield running


class TestInternal:
    """Four nodes of one rank, two stages to a replica: one endpoint, whose commands reach both replicas."""

    def test_tokens_equal_stock(self, internal: AgentsJob, expected: list[list[int]]) -> None:
        check_tokens(internal, expected)
        assert set(generated(internal.endpoints[0])) == {"0", "1"}

    def test_an_adapter_is_loaded_on_both_replicas(
        self, internal: AgentsJob, reference: Reference, tiny_qwen3: Path, tiny_lora: Path
    ) -> None:
        (endpoint,) = internal.endpoints
        adapter = {"lora_name": "late", "lora_path": str(tiny_lora)}
        assert endpoint.call("/v1/load_lora_adapter", adapter)[0] == 200
        _, models = endpoint.call("/v1/models")
        assert {model["id"] for model in models["data"]} == {"tiny", "late"}
        (answer,) = reference.greedy(tiny_qwen3, PROMPTS[:1], lora=tiny_lora)
        for replica in (0, 1):
            assert endpoint.greedy_of(replica, PROMPTS[0], model="late") == answer.tokens

    def test_the_prefix_caches_of_both_replicas_are_reset(self, internal: AgentsJob) -> None:
        (endpoint,) = internal.endpoints
        prompt = "a long beginning " * 20

        def hits_when_asked_again() -> list[float]:
            before = endpoint.by_engine("vllm:prefix_cache_hits_total")
            for replica in (0, 1):
                endpoint.greedy_of(replica, prompt, 1)
            after = endpoint.by_engine("vllm:prefix_cache_hits_total")
            return [after[engine] - before[engine] for engine in ("0", "1")]

        hits_when_asked_again()
        assert min(hits_when_asked_again()) > 0
        assert endpoint.call("/reset_prefix_cache", {})[0] == 200
        assert hits_when_asked_again() == [0, 0]

    def test_both_replicas_sleep_and_wake_up(self, internal: AgentsJob) -> None:
        """Level 0: scheduling alone, which is what a CPU can do."""
        (endpoint,) = internal.endpoints
        assert endpoint.call("/sleep?level=0&mode=keep", {})[0] == 200
        assert endpoint.call("/is_sleeping") == (200, {"is_sleeping": True})
        before = generated(endpoint)
        with ThreadPoolExecutor(2) as clients:
            answers = [clients.submit(endpoint.greedy_of, replica, "zzz", 8) for replica in (0, 1)]
            assert not wait(answers, timeout=ASLEEP_S).done
            assert generated(endpoint) == before
            assert endpoint.call("/wake_up?tags=scheduling", {})[0] == 200
            assert [len(answer.result()) for answer in answers] == [8, 8]
        after = generated(endpoint)
        assert {engine: after[engine] - before[engine] for engine in after} == {"0": 8, "1": 8}


@pytest.fixture(scope="class")
def four_hosts(can_simulate_hosts: None) -> Iterator[Hosts]:
    with Hosts("node0", "node1", "node2", "node3") as hosts:
        yield hosts


@pytest.mark.netns
@pytest.mark.by_hand  # two more starts of four ranks; test_hosts.py has a network in CI
class TestAcrossNetworks:
    """Four hosts of one rank that share nothing but a network."""

    def test_internal(
        self, four_hosts: Hosts, tiny_qwen3: Path, tmp_path: Path, expected: list[list[int]]
    ) -> None:
        flags = Plan("internal", dp=2, pp=2, tp=1, nodes=4).flags
        with hosts_job(four_hosts, tiny_qwen3, tmp_path, *flags).running() as job, four_hosts.inside("node3"):
            assert job.endpoint.greedy_together(PROMPTS) == expected
            assert min(generated(job.endpoint).values()) > 0

    def test_external(
        self, four_hosts: Hosts, tiny_qwen3: Path, tmp_path: Path, expected: list[list[int]]
    ) -> None:
        """Each host's first endpoint has the port that was given."""
        flags = Plan("external", dp=2, pp=1, tp=2, nodes=4).flags
        job = hosts_job(four_hosts, tiny_qwen3, tmp_path, *flags)
        with job.running(), four_hosts.inside("node1"):
            for host in ("node0", "node2"):
                endpoint = Endpoint(f"http://{four_hosts.address(host)}:{HTTP_PORT}")
                wait_until(partial(answers, f"{endpoint.url}/health"), 60.0, f"the endpoint of {host}")
                assert endpoint.greedy_together(PROMPTS) == expected


class TestRefusals:
    """One line, before anything is loaded, the same from every rank."""

    @pytest.mark.by_hand  # test_load_balancing.py has the same without the start
    def test_hybrid_with_all_first_ranks_on_one_node(self, tiny_qwen3: Path, tmp_path: Path) -> None:
        job = agents_job(tiny_qwen3, tmp_path, "-dp=2", "--lb=hybrid", nodes=1, ranks=2)
        assert "all of them (ranks 0-1) are on" in job.refusal(60)

    def test_a_taken_port_of_another_node(self, tiny_qwen3: Path, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            job = agents_job(
                tiny_qwen3,
                tmp_path,
                *("-dp=2", "--lb=external"),
                nodes=2,
                ranks=1,
                endpoints=2,
                ports=[free_port(), taken],
            )
            assert f"--port {taken} is taken by another process on this host" in job.refusal(120)
