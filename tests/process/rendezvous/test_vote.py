"""One rank's problem is everybody's: all say the same."""

import time
from collections.abc import Callable
from typing import Any

from spmd_serve.errors import PeerLost, SpmdError, UsageError
from spmd_serve.rendezvous.join import connect_store, wait_keys
from spmd_serve.rendezvous.vote import vote
from spmd_serve.topology import Cluster, RankInfo
from tests.support.forked import Children, store_server

RANKS = 3


def cluster() -> Cluster:
    return Cluster(
        tuple(
            RankInfo(rank, 0, rank, f"node{rank}", "10.0.0.1", "eth0", 1, rank, "m", "cpu")
            for rank in range(RANKS)
        )
    )


def voter(
    port: int, rank: int, problems: dict[str, SpmdError | None], timeout_s: float = 20.0
) -> Callable[[], Any]:
    """Votes on each question in turn; tells what it got to hear."""

    def body() -> dict[str, object]:
        store = connect_store("127.0.0.1", port, "round_id", 10.0)
        said: list[str] = []
        passed: list[str] = []
        try:
            for what, problem in problems.items():
                vote(store, cluster().ranks[rank], cluster(), what, problem, timeout_s, said.append)
                passed.append(what)
        except SpmdError as error:
            return {"passed": passed, "failed": str(error), "kind": type(error).__name__}
        return {"passed": passed}

    return body


def results(problems: dict[int, dict[str, SpmdError | None]]) -> list[dict[str, Any]]:
    with store_server() as (_, port), Children() as children:
        started = [children.start(voter(port, rank, questions)) for rank, questions in problems.items()]
        return [child.result() for child in started]


def test_when_all_is_well_all_go_on() -> None:
    fine: dict[str, SpmdError | None] = {"the port": None, "the model": None}
    assert results(dict.fromkeys(range(RANKS), fine)) == [{"passed": ["the port", "the model"]}] * RANKS


def test_one_ranks_problem_is_told_by_all_with_its_name() -> None:
    fine: dict[str, SpmdError | None] = {"the port": None, "the model": None}
    heard = results({0: fine, 1: {"the port": None, "the model": UsageError("no such folder")}, 2: fine})
    assert {result["failed"] for result in heard} == {"rank 1 on node1: no such folder"}
    assert {result["kind"] for result in heard} == {"UsageError"}
    assert all(result["passed"] == ["the port"] for result in heard)


def test_what_all_have_in_common_needs_no_name() -> None:
    heard = results({rank: {"the model": UsageError("unknown flag")} for rank in range(RANKS)})
    assert {result["failed"] for result in heard} == {"unknown flag"}


def test_of_several_problems_the_lowest_ranks_is_told() -> None:
    heard = results({0: {"x": None}, 1: {"x": UsageError("first")}, 2: {"x": PeerLost("second")}})
    assert {result["failed"] for result in heard} == {"rank 1 on node1: first"}


def test_who_does_not_vote_is_named() -> None:
    question: dict[str, SpmdError | None] = {"the port": None}
    with store_server() as (_, port), Children() as children:

        def until_it_has_voted() -> None:
            store = connect_store("127.0.0.1", port, "round_id", 10.0)
            wait_keys(store, {"vote/the port/2": "rank 2"}, time.monotonic() + 20.0, print)

        other = children.start(voter(port, 2, question))
        children.start(until_it_has_voted).result()
        # Rank 0 counts the time.
        heard = [child.result() for child in (children.start(voter(port, 0, question, 0.3)), other)]
    assert {result["kind"] for result in heard} == {"PeerLost"}
    (text,) = {result["failed"] for result in heard}
    assert text.startswith("the port of rank 1 on node1 did not come within ")
