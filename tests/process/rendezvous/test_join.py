"""The handshake between real processes on a real TCPStore, with deaths in the middle of it."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from harness.ports import free_port
from spmd_serve.errors import PeerLost, SpmdError, UsageError
from spmd_serve.rendezvous import handshake, join, store
from spmd_serve.rendezvous.join import connect_store, join_round
from spmd_serve.system import network
from spmd_serve.system.network import Route
from spmd_serve.system.torchrun_env import TorchrunEnv
from spmd_serve.topology import Cluster
from tests.support.faults import freeze, frozen, thaw
from tests.support.forked import Child, Children, store_server

WORLD = 4
LOOPBACK = Route("127.0.0.1", "lo")


def env_of(
    rank: int, port: int, *, nodes: int = 2, world: int = WORLD, agent_store: bool = True
) -> TorchrunEnv:
    """The place of a rank in a world of `nodes` agents, all on this machine; the agent is this process."""
    each = world // nodes
    return TorchrunEnv(
        rank=rank,
        local_rank=rank % each,
        group_rank=rank // each,
        world_size=world,
        local_world_size=each,
        group_world_size=nodes,
        master_addr="127.0.0.1",
        master_port=port,
        run_id="test",
        restart_count=0,
        max_restarts=0,
        agent_pid=os.getpid(),
        launched=True,
        agent_store=agent_store,
    )


Fault = Callable[[str, str], bool]


class FaultyStore:
    """A store whose process does `then` before or after the first call that `at` picks by name and key."""

    def __init__(self, inner: Any, at: Fault, then: Callable[[], None], after: bool) -> None:
        self._inner, self._at, self._then, self._after = inner, at, then, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*arguments: Any) -> Any:
            key = arguments[0] if isinstance(arguments[0], str) else ""
            hit = self._at(name, key)
            if hit and not self._after:
                self._then()
            result = method(*arguments)
            if hit and self._after:
                self._then()
            return result

        return call


def die() -> None:
    # To this thread: a signal to the process may let it run on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL)


def with_fault(at: Fault, then: Callable[[], None] = die, *, after: bool) -> Callable[[], None]:
    """To be called in a rank's process: its handshake then runs on a FaultyStore."""

    def arm() -> None:
        def faulty(prefix: str, raw: Any) -> FaultyStore:
            return FaultyStore(PrefixStore(prefix, raw), at, then, after)

        setattr(join, "PrefixStore", faulty)  # noqa: B010 (mypy: it is a class there)

    return arm


def rank_process(
    env: TorchrunEnv,
    arm: Callable[[], None] = lambda: None,
    *,
    timeout_s: float = 20.0,
    head: str | None = None,
    route: Route = LOOPBACK,
) -> Callable[[], dict[str, Any]]:
    """What a rank does: join, and tell what came of it."""

    def body() -> dict[str, Any]:
        arm()
        said: list[str] = []
        started = time.monotonic()
        try:
            membership = join_round(env, route, head=head, timeout_s=timeout_s, device="cpu", say=said.append)
        except SpmdError as error:
            took = time.monotonic() - started
            return {"failed": str(error), "kind": type(error).__name__, "said": said, "took": took}
        child = connect_store(membership.host, membership.port, membership.round_id, 5.0)
        child.set(f"mark/{membership.me.rank}", "here")
        assert membership.store.get(f"mark/{membership.me.rank}") == b"here"
        return {
            "round_id": membership.round_id,
            "cluster": membership.cluster.to_json(),
            "rank": membership.me.rank,
            "said": said,
        }

    return body


def joined(children: Iterable[Child]) -> tuple[str, Cluster]:
    """All of them sit in the same run, each in its own place."""
    results = [child.result() for child in children]
    assert not [result["failed"] for result in results if "failed" in result]
    assert len({result["round_id"] for result in results}) == 1
    assert len({result["cluster"] for result in results}) == 1
    assert sorted(result["rank"] for result in results) == list(range(len(results)))
    return results[0]["round_id"], Cluster.from_json(results[0]["cluster"])


def before(name: str, key: str) -> Callable[[], None]:
    return with_fault(lambda called, on: called == name and on.endswith(key), after=False)


def after(name: str, key: str) -> Callable[[], None]:
    return with_fault(lambda called, on: called == name and on.endswith(key), after=True)


# Who dies where; the others are then killed, as torchrun does, and the next round starts on the same store.
DEATHS: list[dict[int, Callable[[], None]]] = [
    {3: before("add", "/arrivals")},  # its hello stands there, uncounted
    {0: after("set", "current")},  # a nonce that nobody will ever close
    {0: before("compare_set", "current")},  # a cluster written, but not published
    {0: after("compare_set", "current"), 2: after("set", "/2")},  # published by a rank that is dead
    {1: after("get", "current"), 3: before("set", "/3")},
]


def test_restart_after_restart_on_one_store() -> None:
    """Five rounds end in the middle; the sixth finds itself, and nobody believes a dead round."""
    with store_server() as (_, port), Children() as ranks:
        for deaths in DEATHS:
            children = {
                rank: ranks.start(rank_process(env_of(rank, port), deaths.get(rank, lambda: None)))
                for rank in range(WORLD)
            }
            for rank in deaths:
                children[rank].wait_killed()
            ranks.end()
        started = [ranks.start(rank_process(env_of(rank, port))) for rank in range(WORLD)]
        _, cluster = joined(started)
        assert [info.pid for info in cluster.ranks] == [child.pid for child in started]
        assert [info.node for info in cluster.ranks] == [0, 0, 1, 1]


def test_a_restart_after_a_whole_round_gets_a_nonce_of_its_own() -> None:
    with store_server() as (_, port), Children() as ranks:
        nonces = set()
        for _ in range(3):
            started = [ranks.start(rank_process(env_of(rank, port))) for rank in range(WORLD)]
            round_id, cluster = joined(started)
            nonces.add(round_id)
            assert [info.pid for info in cluster.ranks] == [child.pid for child in started]
        assert len(nonces) == 3


def test_a_smaller_world_on_the_same_store() -> None:
    """torchrun --nnodes=1:2 goes on with one node: what the larger world wrote is not looked at."""
    with store_server() as (_, port), Children() as ranks:
        joined([ranks.start(rank_process(env_of(rank, port))) for rank in range(4)])
        joined([ranks.start(rank_process(env_of(rank, port, nodes=1, world=2))) for rank in range(2)])


def stop_self() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def test_a_stale_rank_0_that_wakes_up_late_learns_that_it_is_out() -> None:
    with store_server() as (_, port), Children() as ranks:
        arm = with_fault(lambda name, key: name == "set" and key == "current", stop_self, after=True)
        stale = ranks.start(rank_process(env_of(0, port), arm))
        _, status = os.waitpid(stale.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        started = [ranks.start(rank_process(env_of(rank, port))) for rank in range(WORLD)]
        _, cluster = joined(started)
        assert cluster.ranks[0].pid == started[0].pid
        thaw(stale.pid)
        result = stale.result()
        assert result["kind"] == "PeerLost"
        assert f"process {started[0].pid}" in result["failed"]
        assert f"process {stale.pid}" in result["failed"]


def test_a_rank_0_that_was_overtaken_does_not_publish() -> None:
    """It stops just before it publishes; the round of its successor stands, with the same other ranks."""
    with store_server() as (_, port), Children() as ranks:
        arm = with_fault(lambda name, key: name == "compare_set", stop_self, after=False)
        stale = ranks.start(rank_process(env_of(0, port), arm))
        others = [ranks.start(rank_process(env_of(rank, port))) for rank in range(1, WORLD)]
        _, status = os.waitpid(stale.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        fresh = ranks.start(rank_process(env_of(0, port)))
        _, cluster = joined([fresh, *others])
        assert cluster.ranks[0].pid == fresh.pid
        thaw(stale.pid)
        assert stale.result()["kind"] == "PeerLost"


def quick_rivals() -> None:
    handshake._RECLAIM_S = 0.1


def test_two_processes_in_rank_0s_place_are_both_told() -> None:
    """As when both nodes of a static rendezvous are started without --node-rank."""
    with store_server() as (_, port), Children() as ranks:
        pair = [ranks.start(rank_process(env_of(0, port), quick_rivals)) for _ in range(2)]
        results = [child.result() for child in pair]
        assert {result["kind"] for result in results} == {"UsageError"}
        for result in results:
            assert "both claim the same place" in result["failed"]
            assert "--node-rank" in result["failed"]
            assert all(f"process {child.pid}" in result["failed"] for child in pair)


@pytest.fixture
def soon_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait says what it waits for after 50 ms; otherwise as it is: after 3 s."""
    assert store.FIRST_WORD_S == 3.0
    monkeypatch.setattr(store, "FIRST_WORD_S", 0.05)


@pytest.mark.usefixtures("soon_told")
def test_a_node_that_never_comes_is_named_on_all_others() -> None:
    with store_server() as (_, port), Children() as ranks:
        host = socket.gethostname()
        # Rank 0 counts the time, in which rank 1 has to come, and gives up first however late it starts.
        started = [
            ranks.start(rank_process(env_of(rank, port), timeout_s=6.0 if rank == 0 else 20.0))
            for rank in range(2)
        ]
        results = [child.result() for child in started]
        assert {result["kind"] for result in results} == {"UsageError"}
        assert len({result["failed"] for result in results}) == 1
        assert re.match(r"torchrun ranks 2-3 have not joined within [1-9] s ", results[0]["failed"])
        assert f"(joined: ranks 0-1 on {host})" in results[0]["failed"]
        assert "--join-timeout" in results[0]["failed"]
        for result in results:
            # At 50 ms the other one may not have come yet.
            assert len(result["said"]) == 1
            assert re.match(r"waiting for torchrun (ranks 2-3 |ranks 1-3 |rank 0 )\(", result["said"][0])


def test_a_missing_rank_0_is_named_though_a_dead_one_left_its_keys() -> None:
    with store_server() as (_, port), Children() as ranks:
        dead = ranks.start(rank_process(env_of(0, port), before("compare_set", "current")))
        others = [ranks.start(rank_process(env_of(rank, port))) for rank in range(1, WORLD)]
        dead.wait_killed()
        for child in others:
            child.end()
        result = ranks.start(rank_process(env_of(1, port), timeout_s=0.2)).result()
        assert result["failed"].startswith("torchrun rank 0 has not joined within ")
        assert "torchrun rank 1 (process" in result["failed"]


def test_an_unknown_head_is_the_same_error_on_every_rank() -> None:
    with store_server() as (_, port), Children() as ranks:
        started = [ranks.start(rank_process(env_of(rank, port), head="nobody")) for rank in range(WORLD)]
        results = [child.result() for child in started]
        host = socket.gethostname()
        assert {result["failed"] for result in results} == {
            f"--head nobody is none of this run's hosts: {host} (127.0.0.1)"
        }


def test_a_dead_rounds_error_is_not_believed() -> None:
    with store_server() as (_, port), Children() as ranks:
        for child in [ranks.start(rank_process(env_of(rank, port), head="nobody")) for rank in range(WORLD)]:
            assert "failed" in child.result()
        late = ranks.start(rank_process(env_of(3, port)))
        others = [ranks.start(rank_process(env_of(rank, port))) for rank in (2, 1, 0)]
        joined([late, *others])


@pytest.mark.usefixtures("soon_told")
def test_an_unreachable_store_is_named_with_its_address() -> None:
    port = free_port()
    said: list[str] = []
    with pytest.raises(UsageError) as caught:
        join_round(env_of(1, port), LOOPBACK, head=None, timeout_s=1.0, device="cpu", say=said.append)
    text = str(caught.value)
    assert "\n" not in text
    assert f"torchrun rank 1 on {socket.gethostname()}" in text
    assert f"127.0.0.1:{port}" in text
    assert "Connection refused" in text
    assert "firewall" in text and "--rdzv-endpoint" in text
    assert [text.partition(";")[0] for text in said] == [
        f"waiting for torchrun's store at 127.0.0.1:{port} (127.0.0.1: Connection refused)"
    ]


def test_the_stores_death_is_an_error_at_once() -> None:
    with store_server() as (server, port), Children() as ranks:
        arm = with_fault(lambda name, key: name == "set" and key == "current", stop_self, after=True)
        lonely = ranks.start(rank_process(env_of(0, port), arm))
        os.waitpid(lonely.pid, os.WUNTRACED)
        server.end()
        thaw(lonely.pid)
        result = lonely.result()
        assert result["kind"] == "PeerLost"
        assert result["failed"].startswith("torchrun's store is gone (")


def test_a_silent_store_does_not_hold_a_rank() -> None:
    with store_server() as (server, port):
        client = connect_store("127.0.0.1", port, "n", 5.0)
        client.set("key", "value")
        with frozen(server.pid), pytest.raises(PeerLost, match="silent for 0 s"):
            store.answered(lambda: client.get("key"), 0.3)


def test_a_call_to_the_store_returns_what_it_raises() -> None:
    def wrong() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        store.answered(wrong)


def test_an_orphan_does_not_join() -> None:
    """Its torchrun agent is gone: torchrun may have started another process in its place."""
    with store_server() as (_, port):
        env = replace(env_of(0, port), agent_pid=os.getppid() + 1)
        with pytest.raises(PeerLost, match=r"the torchrun agent .* is gone"):
            join_round(env, LOOPBACK, head=None, timeout_s=5.0, device="cpu", say=print)


def test_rank_0_serves_the_store_where_torchrun_does_not() -> None:
    port = free_port()

    env = env_of(1, port, world=2, agent_store=False)

    def rank_1() -> dict[str, Any]:
        membership = join_round(env, LOOPBACK, head=None, timeout_s=20, device="cpu", say=print)
        join.put_json(membership.store, "mark/1", True)
        join.leave_together(membership.store, "end", 2, 20)
        return {"round_id": membership.round_id, "cluster": membership.cluster.to_json(), "rank": 1}

    with Children() as ranks:
        joined([ranks.start(rank_0_that_serves(port)), ranks.start(rank_1)])


def rank_0_that_serves(port: int) -> Callable[[], dict[str, Any]]:
    env = env_of(0, port, world=2, agent_store=False)

    def body() -> dict[str, Any]:
        membership = join_round(env, LOOPBACK, head=None, timeout_s=20, device="cpu", say=print)
        mark = join.get_json(membership.store, "mark/1", 20, "the mark", "rank 1", print)
        assert mark is True
        join.leave_together(membership.store, "end", 2, 20)
        return {"round_id": membership.round_id, "cluster": membership.cluster.to_json(), "rank": 0}

    return body


def test_a_taken_master_port_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"can't serve the store on MASTER_PORT={port} "):
            join_round(
                env_of(0, port, agent_store=False), LOOPBACK, head=None, timeout_s=5, device="cpu", say=print
            )


def test_without_torchrun_a_world_of_one() -> None:
    env = TorchrunEnv.read({})
    route = network.route_to(env.master_addr, env.master_port)
    membership = join_round(env, route, head=None, timeout_s=5.0, device="cpu", say=print, cpus=[0, 2])
    assert (membership.me.rank, membership.me.node, membership.me.hostname) == (0, 0, socket.gethostname())
    assert (membership.me.address, membership.me.device, membership.me.cpus) == ("127.0.0.1", "cpu", "0,2")
    assert membership.host == "127.0.0.1" and membership.port > 0
    assert len(membership.round_id) == 12


@pytest.mark.usefixtures("soon_told")
def test_keys_that_do_not_come_are_named_by_owner() -> None:
    with store_server() as (_, port):
        client = connect_store("127.0.0.1", port, "n", 5.0)
        client.set("a", "1")
        said: list[str] = []
        keys = {"a": "rank 0 on x", "b": "rank 1 on x", "c": "rank 2 on y"}
        with pytest.raises(PeerLost, match=r"^flags of rank 1 on x, rank 2 on y did not come within \d s"):
            join.wait_keys(client, keys, time.monotonic() + 1.0, said.append, what="flags")
        assert [text.partition(";")[0] for text in said] == ["waiting for flags of rank 1 on x, rank 2 on y"]
        with pytest.raises(UsageError):
            join.wait_keys(client, keys, time.monotonic(), print, error=UsageError)


def test_a_value_that_comes_during_the_wait() -> None:
    with store_server() as (_, port):
        client = connect_store("127.0.0.1", port, "n", 5.0)
        writer = connect_store("127.0.0.1", port, "n", 5.0)
        thread = threading.Timer(0.1, lambda: join.put_json(writer, "key", {"x": [1, 2]}))
        thread.start()
        assert join.get_json(client, "key", 10.0, "the value", "rank 1 on x", print) == {"x": [1, 2]}
        thread.join()


def test_leaving_together_does_not_wait_for_the_dead() -> None:
    with store_server() as (server, port):
        client = connect_store("127.0.0.1", port, "n", 5.0)
        started = time.monotonic()
        join.leave_together(client, "end", 2, 0.3)
        assert 0.3 <= time.monotonic() - started < 5
        freeze(server.pid)
        join.leave_together(client, "end", 3, 0.3)
        thaw(server.pid)


def test_a_child_that_cannot_reach_the_store_says_where_it_is() -> None:
    port = free_port()
    with pytest.raises(PeerLost, match=f"can't reach torchrun's store at 127.0.0.1:{port}"):
        connect_store("127.0.0.1", port, "n", 1.0)
