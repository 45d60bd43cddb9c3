"""What an engine core's watcher gets to know of its waiting for replies."""

from typing import Any

import pytest

from spmd_serve.liveness.status_table import StatusEntry, StatusTable

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class Replies:
    """A rank's replies, and what the board says at the time at which one is waited for."""

    def __init__(self, board: StatusTable) -> None:
        self.seen: list[int | None] = []
        self._status_table = board

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        reading = self._status_table.read(0)
        assert reading.works_since > 0.0
        self.seen.append(reading.awaits)
        if timeout is not None:
            raise TimeoutError(f"{timeout:g}")
        return "reply"

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("works", [True, False])
def test_a_reply_that_is_waited_for_is_noted_and_that_it_has_come_is_progress(works: bool) -> None:
    """In a step, and between steps, where the loop waits again afterwards."""
    from spmd_serve.engine.driver_watch import AwaitedReplies

    board = StatusTable()
    entry = StatusEntry(board.fd, 0)
    source = Replies(board)
    replies = AwaitedReplies(source, 3, entry)
    if works:
        entry.works()
    before = board.read(0).works_since
    assert replies.dequeue(indefinite=True) == "reply"
    with pytest.raises(TimeoutError, match="5"):
        replies.dequeue(timeout=5.0)
    assert source.seen == [3, 3] and board.read(0).awaits is None
    assert board.read(0).works_since > before if works else board.read(0).works_since == 0.0
