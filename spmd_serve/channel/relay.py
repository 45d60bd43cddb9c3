"""A host's relay: what its leader receives from the driver goes into the host's ring, still encoded.

The payload is not decoded on the way: the relay runs in a thread of the leader's rank, where each object
built would take the interpreter lock from that rank's model step, while the ranks decode on their own cores.
An empty payload is the end. The ring is any object with enqueue (vLLM's MessageQueue inside a host).
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from spmd_serve.channel.base import ChannelClosed, ChannelStopped, Deadline, Ring, RingReader
from spmd_serve.wire import codec

END = b""
_FULL_S = 0.005


class Source(Protocol):
    """A BroadcastInbox, as the relay sees it."""

    def receive(self, timeout: float | None = None) -> bytes | bytearray:
        """The next encoded message."""

    def shutdown(self) -> None:
        """Wake a waiting receive."""


class Relay:
    """Moves messages from the network into the ring until the driver stops or somebody calls shutdown().

    A full ring blocks it there and nowhere else. Any error ends it and goes to `on_error`, in its thread; the
    caller ends the process then, for without the relay its ranks would wait for ever.
    """

    def __init__(self, source: Source, ring: Ring, on_error: Callable[[BaseException], None]) -> None:
        self._source, self._ring, self._on_error = source, ring, on_error
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spmd-relay", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Nothing to wait for."""

    def join(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the driver's end; whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def shutdown(self) -> None:
        """Stop relaying; the ring gets no end. Signal-safe."""
        self._closing = True
        self._source.shutdown()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._put(self._source.receive())
        except ChannelStopped:
            with suppress(ChannelClosed):
                self._put(END)
            self._source.shutdown()
        except ChannelClosed:
            pass
        except BaseException as error:
            self._on_error(error)

    def _put(self, payload: bytes | bytearray) -> None:
        while not self._closing:
            with suppress(TimeoutError):
                self._ring.enqueue(payload, timeout=0.0)
                return
            # vLLM's ring would spin for a place, and take the interpreter lock from this rank's long step.
            time.sleep(_FULL_S)
        raise ChannelClosed("the relay is closed")


class RingInbox:
    """A rank's inbox over a ring of encoded payloads."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._closing = False
        self._ended = False

    def wait_until_ready(self) -> None:
        """The ring's own business: its maker waits for it."""

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> object:
        """The driver's next object. TimeoutError, ChannelClosed, ChannelStopped, RefusedClass."""
        deadline = Deadline(None if indefinite else timeout)
        while True:
            if self._closing:
                raise ChannelClosed("the host's ring is closed")
            if self._ended:
                raise ChannelStopped("the driver has ended the channel")
            try:
                payload = self._ring.dequeue(timeout=deadline.left(), indefinite=True)
            except TimeoutError:
                if deadline.over():
                    raise
                continue
            except RuntimeError as error:  # what vLLM's MessageQueue raises for a reader that is shut down
                if self._closing:
                    raise ChannelClosed("the host's ring is closed") from error
                raise
            if len(payload):
                return codec.decode(payload)
            self._ended = True

    def shutdown(self) -> None:
        """Wake a waiting dequeue within a slice. Signal-safe."""
        self._closing = True


class LocalRing:
    """A ring inside one process, between a relay thread and the rank's loop."""

    def __init__(self, most: int = 0) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(most)

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Add `obj`; TimeoutError when it stayed full for `timeout` seconds."""
        try:
            self._queue.put(obj, timeout=timeout)
        except queue.Full:
            raise TimeoutError from None

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object; TimeoutError after `timeout` seconds."""
        try:
            return self._queue.get(timeout=Deadline(timeout).left(3600.0) if timeout is not None else None)
        except queue.Empty:
            raise TimeoutError from None
