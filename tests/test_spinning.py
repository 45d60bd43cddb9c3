"""When readers of a ring may poll."""

from pathlib import Path

import pytest

from spmd_serve.spinning import is_autogrouped, who_spins
from tests.support.cluster import cluster


@pytest.mark.parametrize(
    ("cores", "autogrouped", "expected"),
    [
        (4, True, (True, True)),
        (64, False, (True, True)),
        (3, True, (False, False)),
        (2, True, (False, False)),
        (2, False, (True, False)),
        (1, False, (True, False)),
    ],
)
def test_only_spare_cores_are_spent(cores: int, autogrouped: bool, expected: tuple[bool, bool]) -> None:
    job = cluster(2, 2)  # two ranks on each of two machines
    assert who_spins(job, job.ranks[0], cores, autogrouped=autogrouped) == expected


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
