"""The table that rank 0 prints at start."""

from spmd_serve.commands.start_table import start_table
from spmd_serve.topology import Cluster, Layout, RankInfo


def cluster(ranks: int) -> Cluster:
    return Cluster(
        tuple(
            RankInfo(
                rank=rank,
                local_rank=rank % 2,
                node=rank // 2,
                hostname=f"node{rank // 2}",
                address=f"10.0.0.{rank // 2 + 1}",
                interface="eth0",
                pid=90 + rank * 10,
                torchrun_rank=rank,
                machine_id="m",
                device=f"cuda:{rank % 2}",
            )
            for rank in range(ranks)
        )
    )


def test_every_rank_has_a_line_with_its_coordinates() -> None:
    table = start_table(cluster(4), Layout(tp=2, pp=2, dp=1), {"http://0.0.0.0:8000": [0]})
    assert table.splitlines() == [
        "rank  host   device  dp  pp  tp  pid  interface",
        "0     node0  cuda:0  0   0   0   90   eth0 10.0.0.1",
        "1     node0  cuda:1  0   0   1   100  eth0 10.0.0.1",
        "2     node1  cuda:0  0   1   0   110  eth0 10.0.0.2",
        "3     node1  cuda:1  0   1   1   120  eth0 10.0.0.2",
        "http://0.0.0.0:8000",
    ]


def test_a_url_shows_the_replicas_behind_it() -> None:
    urls = {"http://node0:8000": [0, 1], "http://node1:8000": [2]}
    table = start_table(cluster(6), Layout(tp=2, pp=1, dp=3), urls)
    assert table.splitlines()[-2:] == [
        "http://node0:8000  (replicas 0-1)",
        "http://node1:8000  (replica 2)",
    ]


def test_without_urls_there_are_only_ranks() -> None:
    assert len(start_table(cluster(2), Layout(tp=2, pp=1, dp=1), {}).splitlines()) == 3
