"""What a real watcher sends to event subscribers and answers to probes."""

import asyncio
import http.client
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from spmd_serve.server.admission import AdmissionControl, TrackedRequest
from spmd_serve.server.events import JobEvents
from tests.support.faults import frozen, state
from tests.support.liveness import Job, Node

PATIENCE_S = 15.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def run(what: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(what, 4 * PATIENCE_S))


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(int(PATIENCE_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited in vain for {what}")


class InFlight:
    """A request in flight until `leave`; `aborted`: the client has been sent an error."""

    def __init__(self, admission: AdmissionControl) -> None:
        self.aborted = False
        self._admission = admission

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(_message: Any) -> None:
            self.aborted = True

        self._tracked = TrackedRequest({"type": "http"}, receive, send)
        admission.track(self._tracked)

    def leave(self) -> None:
        self._admission.untrack(self._tracked)


@asynccontextmanager
async def followed(node: Node, drain_s: float) -> AsyncIterator[tuple[AdmissionControl, InFlight, JobEvents]]:
    """An API server that follows the node's watcher, with one request in flight."""
    admission = AdmissionControl()
    request = InFlight(admission)
    events = JobEvents(admission, drain_s)
    await events.follow(node.address)
    yield admission, request, events
    await events.close()


def probe(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, text if path == "/metrics" else json.loads(text)
    finally:
        connection.close()


def test_ranks_drain_when_no_request_is_in_flight(job: Job) -> None:
    node = job.node(0, 1)
    job.configure()

    async def body() -> None:
        async with followed(node, 60.0) as (admission, request, events):
            node.ranks[1].link("request_drain", "SIGTERM")
            await until(lambda: admission.refusal, "admission to stop")
            assert events.draining == "SIGTERM" and not request.aborted
            node.ranks[0].link("view", PATIENCE_S)  # a turn of the watcher's loop
            assert not node.ranks[0].saw("drain")
            request.leave()
            assert (await asyncio.to_thread(node.ranks[0].expect, "drain"))["reason"] == "SIGTERM"

    run(body())


@pytest.mark.parametrize("busy", [0, 1])
def test_no_rank_drains_while_a_request_is_in_flight_on_another_node(job: Job, busy: int) -> None:
    """Replicas of an MoE model cannot answer without each other."""
    nodes = [job.node(0, 1), job.node(2, 3)]
    job.configure()

    async def body() -> None:
        async with followed(nodes[0], 60.0) as head, followed(nodes[1], 60.0) as other:
            (_, running, _), (_, done, _) = (head, other) if busy == 0 else (other, head)
            done.leave()
            nodes[1].ranks[0].link("request_drain", "SIGTERM")
            await until(lambda: head[0].refusal and other[0].refusal, "admission to stop on both nodes")
            for node in nodes:  # a turn of each watcher's loop, after what its follower has said
                node.ranks[0].link("view", PATIENCE_S)
            assert not any(rank.saw("drain") for node in nodes for rank in node.ranks)
            running.leave()
            for rank in (*nodes[0].ranks, *nodes[1].ranks):
                assert (await asyncio.to_thread(rank.expect, "drain"))["reason"] == "SIGTERM"

    run(body())


def test_a_node_that_has_left_does_not_delay_the_drain(job: Job) -> None:
    nodes = [job.node(0, 1), job.node(2, 3)]
    job.configure()

    async def body() -> None:
        async with followed(nodes[0], 60.0) as (admission, request, _events):
            async with followed(nodes[1], 60.0) as (other, _, _):
                nodes[0].ranks[0].link("request_drain", "SIGTERM")
                await until(lambda: admission.refusal and other.refusal, "admission to stop on both nodes")
                for rank in nodes[1].ranks:
                    rank.link("leaving")
                    rank.send("exit", 0)
                await until(lambda: state(nodes[1].watcher_pid) in "Z?", "its watcher's end")
            assert not nodes[0].ranks[0].saw("drain")
            request.leave()
            for rank in nodes[0].ranks:
                assert (await asyncio.to_thread(rank.expect, "drain"))["reason"] == "SIGTERM"

    run(body())


def test_a_drain_ends_in_time_with_a_request_in_flight(job: Job) -> None:
    node = job.node(0, 1)
    job.configure()

    async def body() -> None:
        async with followed(node, 0.3) as (_admission, request, _events):
            node.ranks[1].link("request_drain", "SIGTERM")
            await until(lambda: request.aborted, "the abort")
            request.leave()
            await asyncio.to_thread(node.ranks[0].expect, "drain")

    run(body())


def test_a_subscriber_that_disconnects_does_not_delay_the_drain(job: Job) -> None:
    node = job.node(0, 1)
    job.configure()

    async def body() -> None:
        admission = AdmissionControl()
        InFlight(admission)
        events = JobEvents(admission, 60.0)
        await events.follow(node.address)
        node.ranks[1].link("request_drain", "SIGTERM")
        await until(lambda: admission.refusal, "admission to stop")
        await events.close()
        await asyncio.to_thread(node.ranks[0].expect, "drain")

    run(body())


def test_the_root_cause_aborts_requests_in_flight(job: Job) -> None:
    node = job.node(0, 1)
    job.configure(grace_s=20.0)  # the watcher must still answer: it exits with the last of its members

    async def body() -> None:
        async with followed(node, 60.0) as (admission, request, events):
            node.ranks[1].kill()
            await until(lambda: request.aborted, "the abort")
            assert (
                events.root_cause is not None
                and events.root_cause.rank == 1
                and events.root_cause.detect_s is not None
            )
            assert admission.refusal is not None and "/health" in admission.refusal
            # No new connections are accepted: the next round's watcher uses the address.
            view = await events.view()
            assert view["root_cause"]["rank"] == 1
            assert [row["state"] for row in view["members"]] == ["starting", "gone"]

    run(body())


def test_a_watcher_that_does_not_answer_is_an_error_in_time(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "spmd_serve.server.events.VIEW_TIMEOUT_S"
    monkeypatch.setattr(limit, PATIENCE_S)
    node = job.node(0, 1)
    job.configure(rank_timeout=60.0)

    async def body() -> None:
        async with followed(node, 60.0) as (_admission, _request, events):
            first, second = await asyncio.gather(events.view(), events.view())
            assert first["members"] == second["members"] and len(first["members"]) == 2
            with frozen(node.watcher_pid), monkeypatch.context() as frozen_only:
                frozen_only.setattr(limit, 0.3)
                with pytest.raises(TimeoutError, match=r"^no answer within 0\.3 s$"):
                    await events.view()
            await until(lambda: state(node.watcher_pid) in "RS", "the watcher to go on")
            os.kill(node.watcher_pid, signal.SIGKILL)
            with pytest.raises(OSError, match="it is gone"):
                while True:
                    await events.view()

    run(body())


def test_a_watcher_that_is_gone_counts_as_a_failure(job: Job) -> None:
    node = job.node(0, 1)
    job.configure()

    async def body() -> None:
        async with followed(node, 60.0) as (_admission, request, events):
            os.kill(node.watcher_pid, signal.SIGKILL)
            await until(lambda: request.aborted, "the end of the connection")
            assert events.root_cause is not None and "watcher" in events.root_cause.cause

    run(body())


def test_probes_of_two_nodes(job: Job) -> None:
    """The head tells all nodes when all endpoints serve; a drain that begins on one node shows on both."""
    nodes = [job.node(0), job.node(1)]
    ports = [node.ranks[0].link("open_probe", 0) for node in nodes]
    assert [probe(port, "/live")[0] for port in ports] == [200, 200]
    job.configure()
    assert [probe(port, "/ready") for port in ports] == [(503, {"status": "loading"})] * 2
    nodes[1].ranks[0].link("serving", 0, 1)

    async def all_answer(status: int) -> None:
        await until(lambda: all(probe(port, "/ready")[0] == status for port in ports), f"{status}")

    run(all_answer(200))
    for number, port in enumerate(ports):
        text = probe(port, "/metrics")[1]
        assert f'spmd_serve_rank_up{{rank="{number}",' in text
        assert "spmd_serve_failures_total 0\n" in text
    nodes[1].ranks[0].link("request_drain", "SIGTERM")
    run(all_answer(503))
    assert {probe(port, "/ready")[1]["status"] for port in ports} == {"draining"}
    assert [probe(port, "/live")[0] for port in ports] == [200, 200]


def test_a_short_stop_shows_in_the_metrics_only(job: Job) -> None:
    node = job.node(0, 1)
    port = node.ranks[0].link("open_probe", 0)
    job.configure(rank_timeout=60.0)
    node.ranks[1].kill(signal.SIGSTOP)

    def up() -> bool:
        return 'spmd_serve_rank_up{rank="1",host="a"} 1' in probe(port, "/metrics")[1]

    async def body() -> None:
        await until(lambda: not up(), "the stop to be seen")
        assert probe(port, "/live")[0] == 200  # it may last only a moment: --rank-timeout decides
        node.ranks[1].kill(signal.SIGCONT)
        await until(up, "the rank to go on")

    run(body())
