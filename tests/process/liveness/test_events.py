"""What a real watcher tells API servers, which follow it, and whoever probes its host."""

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
from tests.support.liveness import Host, Job

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


class Inside:
    """A request that is inside the gate until `leave`; `told`: it has been cut."""

    def __init__(self, admission: AdmissionControl) -> None:
        self.told = False
        self._admission = admission

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(_message: Any) -> None:
            self.told = True

        self._visit = TrackedRequest({"type": "http"}, receive, send)
        admission.track(self._visit)

    def leave(self) -> None:
        self._admission.untrack(self._visit)


@asynccontextmanager
async def followed(host: Host, drain_s: float) -> AsyncIterator[tuple[AdmissionControl, Inside, JobEvents]]:
    """An API server that follows the host's watcher, with one request inside its gate."""
    admission = AdmissionControl()
    inside = Inside(admission)
    events = JobEvents(admission, drain_s)
    await events.follow(host.address)
    yield admission, inside, events
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


def test_ranks_are_told_to_drain_when_nothing_runs_any_more(job: Job) -> None:
    host = job.host(0, 1)
    job.configure()

    async def body() -> None:
        async with followed(host, 60.0) as (admission, inside, events):
            host.ranks[1].link("request_drain", "SIGTERM")
            await until(lambda: admission.refusal, "the gate to shut")
            assert events.draining == "SIGTERM" and not inside.told
            host.ranks[0].link("view", PATIENCE_S)  # a turn of the watcher's loop
            assert not host.ranks[0].saw("drain")
            inside.leave()
            assert (await asyncio.to_thread(host.ranks[0].expect, "drain"))["reason"] == "SIGTERM"

    run(body())


@pytest.mark.parametrize("busy", [0, 1])
def test_no_rank_is_told_to_drain_while_something_runs_on_another_host(job: Job, busy: int) -> None:
    """Replicas of a mixture of experts can't answer without each other."""
    hosts = [job.host(0, 1), job.host(2, 3)]
    job.configure()

    async def body() -> None:
        async with followed(hosts[0], 60.0) as head, followed(hosts[1], 60.0) as other:
            (_, running, _), (_, done, _) = (head, other) if busy == 0 else (other, head)
            done.leave()
            hosts[1].ranks[0].link("request_drain", "SIGTERM")
            await until(lambda: head[0].refusal and other[0].refusal, "both gates to shut")
            for host in hosts:  # a turn of each watcher's loop, after what its follower has said
                host.ranks[0].link("view", PATIENCE_S)
            assert not any(rank.saw("drain") for host in hosts for rank in host.ranks)
            running.leave()
            for rank in (*hosts[0].ranks, *hosts[1].ranks):
                assert (await asyncio.to_thread(rank.expect, "drain"))["reason"] == "SIGTERM"

    run(body())


def test_a_host_that_has_left_holds_nobody_up(job: Job) -> None:
    hosts = [job.host(0, 1), job.host(2, 3)]
    job.configure()

    async def body() -> None:
        async with followed(hosts[0], 60.0) as (admission, inside, _events):
            async with followed(hosts[1], 60.0) as (other, _, _):
                hosts[0].ranks[0].link("request_drain", "SIGTERM")
                await until(lambda: admission.refusal and other.refusal, "both gates to shut")
                for rank in hosts[1].ranks:
                    rank.link("leaving")
                    rank.send("exit", 0)
                await until(lambda: state(hosts[1].watcher_pid) in "Z?", "its watcher's end")
            assert not hosts[0].ranks[0].saw("drain")
            inside.leave()
            for rank in hosts[0].ranks:
                assert (await asyncio.to_thread(rank.expect, "drain"))["reason"] == "SIGTERM"

    run(body())


def test_a_drain_ends_in_time_whatever_runs(job: Job) -> None:
    host = job.host(0, 1)
    job.configure()

    async def body() -> None:
        async with followed(host, 0.3) as (_admission, inside, _events):
            host.ranks[1].link("request_drain", "SIGTERM")
            await until(lambda: inside.told, "the end of its time")
            inside.leave()
            await asyncio.to_thread(host.ranks[0].expect, "drain")

    run(body())


def test_who_leaves_without_a_word_holds_nobody_up(job: Job) -> None:
    host = job.host(0, 1)
    job.configure()

    async def body() -> None:
        admission = AdmissionControl()
        Inside(admission)
        events = JobEvents(admission, 60.0)
        await events.follow(host.address)
        host.ranks[1].link("request_drain", "SIGTERM")
        await until(lambda: admission.refusal, "the gate to shut")
        await events.close()
        await asyncio.to_thread(host.ranks[0].expect, "drain")

    run(body())


def test_the_verdict_cuts_what_is_inside(job: Job) -> None:
    host = job.host(0, 1)
    job.configure(grace_s=20.0)  # for the watcher, and what it shows, go with the last of its members

    async def body() -> None:
        async with followed(host, 60.0) as (admission, inside, events):
            host.ranks[1].kill()
            await until(lambda: inside.told, "the verdict")
            assert (
                events.root_cause is not None
                and events.root_cause.rank == 1
                and events.root_cause.detect_s is not None
            )
            assert admission.refusal is not None and "/health" in admission.refusal
            # The door for newcomers is shut: the next round's watcher is to have the address.
            view = await events.view()
            assert view["root_cause"]["rank"] == 1
            assert [row["state"] for row in view["members"]] == ["starting", "gone"]

    run(body())


def test_a_watcher_that_does_not_answer_is_an_error_in_time(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "spmd_serve.server.events.VIEW_TIMEOUT_S"
    monkeypatch.setattr(limit, PATIENCE_S)
    host = job.host(0, 1)
    job.configure(rank_timeout=60.0)

    async def body() -> None:
        async with followed(host, 60.0) as (_admission, _inside, events):
            first, second = await asyncio.gather(events.view(), events.view())
            assert first["members"] == second["members"] and len(first["members"]) == 2
            with frozen(host.watcher_pid), monkeypatch.context() as frozen_only:
                frozen_only.setattr(limit, 0.3)
                with pytest.raises(TimeoutError, match=r"^no answer within 0\.3 s$"):
                    await events.view()
            await until(lambda: state(host.watcher_pid) in "RS", "the watcher to go on")
            os.kill(host.watcher_pid, signal.SIGKILL)
            with pytest.raises(OSError, match="it is gone"):
                while True:
                    await events.view()

    run(body())


def test_a_watcher_that_is_gone_counts_as_a_failure(job: Job) -> None:
    host = job.host(0, 1)
    job.configure()

    async def body() -> None:
        async with followed(host, 60.0) as (_admission, inside, events):
            os.kill(host.watcher_pid, signal.SIGKILL)
            await until(lambda: inside.told, "the end of the connection")
            assert events.root_cause is not None and "watcher" in events.root_cause.cause

    run(body())


def test_probes_of_two_hosts(job: Job) -> None:
    """The head says to all when all endpoints serve; a drain that begins elsewhere is seen by both."""
    hosts = [job.host(0), job.host(1)]
    ports = [host.ranks[0].link("open_probe", 0) for host in hosts]
    assert [probe(port, "/live")[0] for port in ports] == [200, 200]
    job.configure()
    assert [probe(port, "/ready") for port in ports] == [(503, {"status": "loading"})] * 2
    hosts[1].ranks[0].link("serving", 0, 1)

    async def all_answer(status: int) -> None:
        await until(lambda: all(probe(port, "/ready")[0] == status for port in ports), f"{status}")

    run(all_answer(200))
    for number, port in enumerate(ports):
        text = probe(port, "/metrics")[1]
        assert f'spmd_serve_rank_up{{rank="{number}",' in text
        assert "spmd_serve_failures_total 0\n" in text
    hosts[1].ranks[0].link("request_drain", "SIGTERM")
    run(all_answer(503))
    assert {probe(port, "/ready")[1]["status"] for port in ports} == {"draining"}
    assert [probe(port, "/live")[0] for port in ports] == [200, 200]


def test_a_short_stop_shows_in_the_metrics_only(job: Job) -> None:
    host = job.host(0, 1)
    port = host.ranks[0].link("open_probe", 0)
    job.configure(rank_timeout=60.0)
    host.ranks[1].kill(signal.SIGSTOP)

    def up() -> bool:
        return 'spmd_serve_rank_up{rank="1",host="a"} 1' in probe(port, "/metrics")[1]

    async def body() -> None:
        await until(lambda: not up(), "the stop to be seen")
        assert probe(port, "/live")[0] == 200  # it may be a moment only: --rank-timeout decides
        host.ranks[1].kill(signal.SIGCONT)
        await until(up, "the rank to go on")

    run(body())
