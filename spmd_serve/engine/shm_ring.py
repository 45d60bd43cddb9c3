"""The control channel inside a host: vLLM's shared-memory ring, one writer, the host's ranks as readers."""

import threading
from dataclasses import asdict
from typing import Any

from spmd_serve.channel.base import ChannelStopped
from spmd_serve.channel.relay import END
from spmd_serve.engine.vllm_compat import (
    Handle,
    MessageQueue,
    keep_notifications,
    last_message_bytes,
    look_again,
    quieten,
    sleep_instead_of_spinning,
)
from spmd_serve.wire import codec


def handle_to_json(handle: Handle) -> dict[str, Any]:
    """A ring's address (names of shared memory and local sockets) as plain JSON values."""
    return asdict(handle)


def handle_from_json(plain: dict[str, Any]) -> Handle:
    """Inverse of `handle_to_json` (JSON has no tuples)."""
    values = dict(plain)
    if values["buffer_handle"] is not None:
        values["buffer_handle"] = tuple(values["buffer_handle"])
    return Handle(**values)


class RingOutbox:
    """The writing end: `enqueue` may be called from several threads (batches, heartbeats, replies)."""

    def __init__(self, readers: int, max_chunk_bytes: int) -> None:
        """Messages above `max_chunk_bytes` go over the ring's socket instead of its memory."""
        self._queue = MessageQueue(readers, readers, max_chunk_bytes=max_chunk_bytes)
        keep_notifications(self._queue)
        self._lock = threading.Lock()

    @property
    def address(self) -> dict[str, Any]:
        """What a reader on this host needs, as JSON values."""
        return handle_to_json(self._queue.export_handle())

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Write `obj` for every reader; waits `timeout` seconds for a free slot, then TimeoutError."""
        with self._lock:
            self._queue.enqueue(obj, timeout)

    def last_bytes(self) -> int:
        """Bytes of the last message, counted once; 0 for one too long for the ring's memory."""
        return last_message_bytes(self._queue)

    def wait_until_ready(self) -> None:
        """Return when all readers are there."""
        self._queue.wait_until_ready()

    def shutdown(self) -> None:
        """Let go; the shared memory is removed as soon as nobody here refers to the ring any more."""
        self._queue.shutdown()


class RingInbox:
    """The reading end of reader number `reader` of the ring at `address`."""

    def __init__(
        self, address: dict[str, Any], reader: int, *, encoded: bool = False, spin: bool = True
    ) -> None:
        """`encoded`: a relay writes what it received from the network, for us to decode.

        `spin`: poll for a second after a message, as vLLM does, or sleep at once.
        """
        self._queue = MessageQueue.create_from_handle(handle_from_json(address), reader)
        look_again(self._queue)
        if not spin:
            sleep_instead_of_spinning(self._queue)
        self._encoded = encoded

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object; TimeoutError after `timeout` seconds, ChannelStopped when a relay ended."""
        obj = self._queue.dequeue(timeout=timeout, indefinite=indefinite)
        if not self._encoded:
            return obj
        if obj == END:
            raise ChannelStopped("the driver has ended the control channel")
        return codec.decode(obj)

    def rest(self) -> None:
        """Nothing urgent follows: sleep until the next message instead of spinning for it."""
        quieten(self._queue)

    def wait_until_ready(self) -> None:
        """Return when the writer has seen all readers."""
        self._queue.wait_until_ready()

    def shutdown(self) -> None:
        """Wake a waiting dequeue."""
        self._queue.shutdown()
