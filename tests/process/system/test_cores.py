"""Shares of cores: a pure function, and what the system says."""

import os
from pathlib import Path

import pytest

from spmd_serve.system.cores import (
    bind,
    cpu_quota,
    format_cpus,
    lent,
    machine_share,
    memory_rivals,
    parse_cpus,
    physical_cores,
    prepare_environ,
    share,
)
from spmd_serve.system.torchrun_env import TorchrunEnv
from spmd_serve.topology import Cluster, RankInfo
from tests.support.forked import Children


@pytest.mark.parametrize(
    ("allowed", "count", "shares"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([4, 5, 6, 7], 2, [[4, 5], [6, 7]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1, 2], [3, 4]]),
        ([0, 2], 1, [[0, 2]]),
        ([0, 1], 3, [[], [], []]),
    ],
)
def test_shares_are_disjoint_neighbours(allowed: list[int], count: int, shares: list[list[int]]) -> None:
    assert [share(allowed, index, count) for index in range(count)] == shares


def siblings(root: Path, lists: dict[int, str]) -> Path:
    for cpu, text in lists.items():
        folder = root / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    return root


def test_one_logical_cpu_of_each_physical_core(tmp_path: Path) -> None:
    sysfs = siblings(tmp_path, {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"})
    assert physical_cores([0, 1, 2, 3, 4, 5], sysfs) == [0, 1, 2]
    assert physical_cores([3, 4, 5], sysfs) == [3, 4, 5]
    assert physical_cores([8, 9], sysfs) == [8, 9]


def env_of(local_rank: int, local_world_size: int) -> TorchrunEnv:
    return TorchrunEnv(
        rank=local_rank,
        local_rank=local_rank,
        group_rank=0,
        world_size=local_world_size,
        local_world_size=local_world_size,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        run_id="r",
        restart_count=0,
        max_restarts=0,
        agent_pid=1,
        launched=True,
    )


@pytest.mark.parametrize(
    ("given", "ranks", "quota", "threads"),
    [
        (None, 1, None, "8"),
        (None, 2, None, "4"),
        ("1", 2, None, "4"),  # torchrun's own, as far as can be told
        ("1", 1, None, "1"),  # a user's: torchrun sets it only for several ranks
        ("3", 2, None, "3"),
        (None, 16, None, "1"),
        (None, 1, 2.5, "3"),
        (None, 2, 3.0, "2"),
        (None, 2, 0.5, "1"),
        ("", 2, 100.0, "4"),
    ],
)
def test_threads_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: str | None,
    ranks: int,
    quota: float | None,
    threads: str,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("spmd_serve.system.cores.cpu_quota", lambda: None)
    environ = {} if given is None else {"OMP_NUM_THREADS": given}
    mine = prepare_environ(env_of(0, ranks), environ, sysfs=tmp_path, quota=quota)
    assert environ == {"OMP_NUM_THREADS": threads}
    assert mine == share(range(8), 0, ranks)


def test_threads_are_one_per_physical_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sysfs = siblings(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    environ: dict[str, str] = {}
    assert prepare_environ(env_of(1, 2), environ, sysfs=sysfs, quota=64.0) == [1]
    assert environ == {"OMP_NUM_THREADS": "1"}


def cgroup(root: Path, own: str, limits: dict[str, str]) -> tuple[Path, Path]:
    mount = root / "cgroup"
    for folder, limit in limits.items():
        (mount / folder).mkdir(parents=True, exist_ok=True)
        (mount / folder / "cpu.max").write_text(limit + "\n")
    (root / "own").write_text(f"3:cpuset:/\n0::{own}\n")
    return root / "own", mount


def test_the_tightest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    limits = {"pod": "150000 100000", "pod/box": "max 100000", "other": "1000 100000"}
    assert cpu_quota(*cgroup(tmp_path, "/pod/box", limits)) == 1.5


def test_a_quota_lends_fewer_cpus_than_the_machine_shows() -> None:
    shown = len(os.sched_getaffinity(0))
    assert [lent(quota) for quota in (0.5, 1.0, 1e6)] == [1, 1, shown]
    assert 1 <= lent() <= shown


def test_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(*cgroup(tmp_path, "/pod", {"pod": "max 100000"})) is None
    assert cpu_quota(tmp_path / "absent", tmp_path) is None


def test_a_container_sees_its_own_root(tmp_path: Path) -> None:
    assert cpu_quota(*cgroup(tmp_path, "/", {"": "50000 100000"})) == 0.5
    assert cpu_quota(*cgroup(tmp_path / "x", "/../other", {"": "50000 100000"})) == 0.5


def info(rank: int, node: int, machine: str, cpus: str) -> RankInfo:
    return RankInfo(rank, 0, node, "host", "10.0.0.1", "eth0", 1, rank, machine, "cpu", cpus)


def shares(cluster: Cluster, tmp_path: Path) -> list[list[int]]:
    return [machine_share(cluster, me, parse_cpus(me.cpus), sysfs=tmp_path) for me in cluster.ranks]


def test_agents_of_one_machine_share_its_cores(tmp_path: Path) -> None:
    two_agents = Cluster((info(0, 0, "a", "0-3"), info(1, 1, "a", "0-3"), info(2, 2, "b", "0-3")))
    assert shares(two_agents, tmp_path) == [[0, 1], [2, 3], [0, 1, 2, 3]]


def test_ranks_bound_elsewhere_take_nothing_away(tmp_path: Path) -> None:
    bound = Cluster((info(0, 0, "a", "0-1"), info(1, 0, "a", "0-1"), info(2, 0, "a", "2-3")))
    assert shares(bound, tmp_path) == [[0], [1], [2, 3]]


def test_memory_is_that_of_who_computes_on_the_same_numa_node(tmp_path: Path) -> None:
    for cpu in range(8):
        (tmp_path / f"cpu{cpu}" / f"node{cpu // 4}").mkdir(parents=True)
    machine = [info(rank, rank // 2, "a", "0-7") for rank in range(4)]
    bound = [info(4, 2, "a", "2"), info(5, 3, "b", "0-7")]
    cluster = Cluster((*machine, *bound))
    rivals = [memory_rivals(cluster, me, sysfs=tmp_path) for me in cluster.ranks]
    assert rivals == [3, 3, 2, 2, 3, 1]
    assert memory_rivals(cluster, machine[0], sysfs=tmp_path / "none") == 5  # nothing is known: all share


def test_cpu_lists_as_text() -> None:
    assert parse_cpus("0-2,8\n") == [0, 1, 2, 8]
    assert format_cpus({8, 1, 0, 2}) == "0-2,8"
    assert parse_cpus(format_cpus([5])) == [5]
    assert parse_cpus("") == []


def test_binding_binds_every_thread() -> None:
    one = min(os.sched_getaffinity(0))

    def body() -> list[int]:
        import threading

        ready, done = threading.Event(), threading.Event()
        seen: list[int] = []

        def thread() -> None:
            ready.set()
            done.wait(10)
            seen.extend(os.sched_getaffinity(0))

        other = threading.Thread(target=thread)
        other.start()
        ready.wait(10)
        bind([one])
        bind([])
        done.set()
        other.join(10)
        return [*seen, *os.sched_getaffinity(0)]

    with Children() as children:
        assert children.start(body).result() == [one, one]
