"""A scheduler (``--scheduler-cls``) that never comes back from a certain request."""

import threading
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.support.faults import STUCK_TOKENS


class StuckScheduler(AsyncScheduler):
    """Waits for ever as a deadlock would: other threads of the engine core go on."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if any(request.max_tokens == STUCK_TOKENS for request in self.requests.values()):
            threading.Event().wait()
        return super().schedule(*args, **kwargs)
