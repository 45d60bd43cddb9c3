"""The way between a driver and the shard in the same process: two queues, where nobody spins or encodes."""

import pickle
import queue
from typing import Any

from spmd_serve.channel.base import ChannelClosed, Deadline

_CLOSED = object()


class LocalQueue:
    """One direction, for one reader. Waiting needs no CPU, and in the main thread Ctrl-C interrupts it."""

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Add `obj`; never waits."""
        self._queue.put(pickle.dumps(obj, 5) if self._copies else obj)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object. TimeoutError after `timeout` seconds, ChannelClosed after shutdown()."""
        seconds = None if indefinite or timeout is None else Deadline(timeout).left(timeout)
        try:
            item = self._queue.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError("nothing came from the same process in time") from None
        if item is _CLOSED:
            self._queue.put(_CLOSED)
            raise ChannelClosed("the way inside this process is closed")
        return pickle.loads(item) if self._copies else item

    def wait_until_ready(self) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        """Wake a waiting dequeue, once it has read what was there before."""
        self._queue.put(_CLOSED)


class OwnLine:
    """Both directions between a driver and its own shard."""

    def __init__(self, copies: bool) -> None:
        """`copies`: objects are copied, for one side goes on (and changes them) before the other reads."""
        self.messages = LocalQueue(copies)
        self.replies = LocalQueue(copies)
