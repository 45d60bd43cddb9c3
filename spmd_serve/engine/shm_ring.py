"""The control channel inside a node: vLLM's shared-memory ring with one writer and the ranks as readers."""

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
from spmd_serve.wire.frames import Kind


class ShmOutbox:
    """The writing end. Several threads may call `enqueue` (batches, heartbeats, replies)."""

    def __init__(self, readers: int, max_chunk_bytes: int) -> None:
        """Create a ring; messages above `max_chunk_bytes` use its local socket instead of its memory."""
        self._queue = MessageQueue(readers, readers, max_chunk_bytes=max_chunk_bytes)
        keep_notifications(self._queue)
        self._lock = threading.Lock()

    @property
    def address(self) -> dict[str, Any]:
        """The names of the shared memory and the local sockets, as JSON values, for a reader on this node."""
        return asdict(self._queue.export_handle())

    def enqueue(self, obj: object, timeout: float | None = None) -> int:
        """Write `obj` for every reader; raise TimeoutError after `timeout` seconds without a free slot.

        Return its size in bytes, or 0 for an object too long for the ring's memory.
        """
        with self._lock:
            self._queue.enqueue(obj, timeout)
            return last_message_bytes(self._queue)

    def wait_until_ready(self) -> None:
        """Return when all readers are connected."""
        self._queue.wait_until_ready()

    def shutdown(self) -> None:
        """Close this end; the shared memory is removed with the last reference to the ring here."""
        self._queue.shutdown()


class ShmInbox:
    """The reading end of reader number `reader` of the ring at `address`."""

    def __init__(
        self, address: dict[str, Any], reader: int, *, encoded: bool = False, busy_poll: bool = True
    ) -> None:
        """Open the ring.

        `encoded`: a relay writes encoded payloads, which this end decodes.
        `busy_poll`: poll for a second after a message, as vLLM does, instead of sleeping at once.
        """
        buffer = address["buffer_handle"]
        handle = Handle(**{**address, "buffer_handle": None if buffer is None else tuple(buffer)})
        self._queue = MessageQueue.create_from_handle(handle, reader)
        look_again(self._queue)
        if not busy_poll:
            sleep_instead_of_spinning(self._queue)
        self._encoded = encoded

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next object; after a heartbeat, sleep instead of polling for the next one.

        Raises TimeoutError after `timeout` seconds, ChannelStopped after the end of a relay.
        """
        obj = self._queue.dequeue(timeout=timeout, indefinite=indefinite)
        if self._encoded:
            if obj == END:
                raise ChannelStopped("the driver has ended the control channel")
            obj = codec.decode(obj)
        if type(obj) is int and obj == Kind.HEARTBEAT:
            self.rest()
        return obj

    def rest(self) -> None:
        """Sleep until the next message instead of polling for it."""
        quieten(self._queue)

    def wait_until_ready(self) -> None:
        """Return when the writer has seen all readers."""
        self._queue.wait_until_ready()

    def shutdown(self) -> None:
        """Wake a waiting dequeue."""
        self._queue.shutdown()
