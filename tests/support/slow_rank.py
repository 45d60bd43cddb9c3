"""A worker extension (``--worker-extension-cls``) that makes one rank slow."""

import time
from typing import Any


class SlowRank:
    """Methods that vLLM adds to each rank's worker; called through /collective_rpc."""

    rank: Any

    def be_slow(self, rank: str, seconds: str) -> None:
        """That rank does nothing else for so long."""
        if self.rank == int(rank):
            time.sleep(float(seconds))
