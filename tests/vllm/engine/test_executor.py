"""What our executor adds to vLLM's, with prepared replies instead of ranks."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.support.cluster import cluster
from tests.unit.config.test_job_spec import spec

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

GIB = 1 << 30


def test_the_rank_with_the_least_memory_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from spmd_serve.engine.executor import TorchrunExecutor

    class Answered(TorchrunExecutor):
        """The executor of the second replica, ranks 2 and 3."""

        def __init__(self) -> None:
            self._spec, self._replica = replace(spec(), cluster=cluster(2, 2)), 1
            self.shutting_down = True

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            return {"determine_available_memory": [5 * GIB, 3 * GIB]}[method]

    logger = logging.getLogger("spmd_serve")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "spmd_serve"):
            assert Answered().determine_available_memory() == [5 * GIB, 3 * GIB]
    finally:
        logger.removeHandler(caplog.handler)
    assert "rank 3 on host1 has the least, 3.00 GiB (the most: 5.00 GiB)" in caplog.text
