"""Waiting for replies is recorded in the status table."""

from typing import Any

import pytest

from spmd_serve.liveness.status_table import StatusEntry, StatusTable

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class Replies:
    """A rank's replies; reads the status table while one is awaited."""

    def __init__(self, table: StatusTable) -> None:
        self.seen: list[int | None] = []
        self._status_table = table

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        reading = self._status_table.read(0)
        assert reading.works_since > 0.0
        self.seen.append(reading.awaits)
        if timeout is not None:
            raise TimeoutError(f"{timeout:g}")
        return "reply"

    def wait_until_ready(self) -> None: ...

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("works", [True, False])
def test_awaited_replies_are_recorded_and_their_arrival_is_progress(works: bool) -> None:
    """In a step, and between steps, where the loop waits again afterwards."""
    from spmd_serve.engine.driver_watch import AwaitedReplies

    table = StatusTable()
    entry = StatusEntry(table.fd, 0)
    source = Replies(table)
    replies = AwaitedReplies(source, 3, entry)
    if works:
        entry.works()
    before = table.read(0).works_since
    assert replies.dequeue(indefinite=True) == "reply"
    with pytest.raises(TimeoutError, match="5"):
        replies.dequeue(timeout=5.0)
    assert source.seen == [3, 3] and table.read(0).awaits is None
    assert table.read(0).works_since > before if works else table.read(0).works_since == 0.0
