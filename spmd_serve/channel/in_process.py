"""The control channel between a driver and the rank in the same process: two queues, without busy polling."""

import pickle
import queue
from typing import Any

from spmd_serve.channel.base import ChannelClosed

_CLOSED = object()


class LocalQueue:
    """One direction, for one reader. Waiting costs no CPU; in the main thread Ctrl-C interrupts it."""

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Add `obj`; never wait."""
        self._queue.put(pickle.dumps(obj, 5) if self._copies else obj)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next object.

        Raises TimeoutError after `timeout` seconds, ChannelClosed after shutdown().
        """
        try:
            item = self._queue.get(timeout=None if indefinite or timeout is None else max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError("no message from the same process in time") from None
        if item is _CLOSED:
            self._queue.put(_CLOSED)
            raise ChannelClosed("the queue inside this process is closed")
        return pickle.loads(item) if self._copies else item

    def wait_until_ready(self) -> None:
        """Do nothing: both ends exist from the start."""

    def shutdown(self) -> None:
        """Wake a waiting dequeue, after it has returned everything sent before."""
        self._queue.put(_CLOSED)


class InProcessChannel:
    """Both directions between a driver and the rank in its own process."""

    def __init__(self, copies: bool) -> None:
        """With `copies`, objects are copied, because the sender changes them before the receiver reads."""
        self.messages = LocalQueue(copies)
        self.replies = LocalQueue(copies)
