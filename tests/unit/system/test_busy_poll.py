"""When readers of a ring may poll."""

import pytest

from spmd_serve.system.busy_poll import may_busy_poll
from tests.support.cluster import cluster


@pytest.mark.parametrize(("cores", "busy_poll"), [(64, True), (4, True), (3, False), (2, False), (1, False)])
def test_only_spare_cores_are_spent(cores: int, busy_poll: bool) -> None:
    job = cluster(2, 2)  # two ranks on each of two machines
    assert may_busy_poll(job, job.ranks[0], cores) is busy_poll
