"""When readers of a ring may poll."""

from pathlib import Path

import pytest

from spmd_serve.spinning import Polling, is_autogrouped, who_polls
from tests.support.cluster import cluster

ALL, DRIVER, NOBODY = Polling(True, True), Polling(True, False), Polling(False, False)


@pytest.mark.parametrize(
    ("cores", "drives", "autogrouped", "expected"),
    [
        (4, 1, True, ALL),
        (64, 2, False, ALL),
        (3, 1, True, Polling(True, False, driver_cores=(0,))),
        (2, 1, True, Polling(True, False, driver_cores=(0,))),
        (2, 2, True, NOBODY),
        (2, 2, False, DRIVER),
        (1, 1, False, DRIVER),
    ],
)
def test_only_spare_cores_are_spent(cores: int, drives: int, autogrouped: bool, expected: Polling) -> None:
    job = cluster(2, 2)  # two ranks on each of two machines
    found = who_polls(job, job.ranks[0], cores, drives=drives, autogrouped=autogrouped, mine=[0])
    assert found == expected


def test_with_more_ranks_than_cores_nobody_has_a_core_to_poll_on() -> None:
    job = cluster(2, 2)
    assert who_polls(job, job.ranks[0], 1, drives=1, autogrouped=True, mine=[]) == NOBODY


@pytest.mark.parametrize(
    ("enabled", "cgroup", "expected"),
    [
        ("1\n", "1:cpu:/\n0::/\n", True),
        ("1\n", "0::/\n", True),
        ("0\n", "0::/\n", False),
        ("1\n", "4:cpu,cpuacct:/docker/abc\n", False),
        ("1\n", "0::/kubepods/pod1\n", False),
        ("1\n", "5:memory:/elsewhere\n2:cpu:/\n", True),
    ],
)
def test_sessions_are_groups_only_outside_containers(
    tmp_path: Path, enabled: str, cgroup: str, expected: bool
) -> None:
    (tmp_path / "autogroup").write_text(enabled)
    (tmp_path / "cgroup").write_text(cgroup)
    assert is_autogrouped(tmp_path / "autogroup", tmp_path / "cgroup") is expected


def test_a_kernel_without_autogroups(tmp_path: Path) -> None:
    assert is_autogrouped(tmp_path / "none", tmp_path / "none") is False
