"""The relay with vLLM's shared-memory MessageQueue as the host's ring."""

import queue
import threading
import time
from typing import Any

import pytest

from spmd_serve.channel.base import ChannelClosed, ChannelStopped
from spmd_serve.channel.relay import Relay, RingInbox
from spmd_serve.wire import codec
from tests.support.rings import connected

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

DEADLINE_S = 20.0


class Source:
    """Stands for the network: what is put in comes out; None is the driver's end."""

    def __init__(self) -> None:
        self.put = (messages := queue.Queue[bytes | None]()).put
        self._messages = messages

    def receive(self, timeout: float | None = None) -> bytes:
        message = self._messages.get(timeout=DEADLINE_S)
        if message is None:
            raise ChannelStopped("the driver has ended it")
        return message

    def shutdown(self) -> None:
        self.put(None)


def ring(slots: int = 10) -> tuple[Any, Any]:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 20, max_chunks=slots)
    return connected(writer, MessageQueue.create_from_handle(writer.export_handle(), 0))


def test_messages_of_all_sizes_then_the_end() -> None:
    writer, reader = ring()
    source, errors = Source(), list[BaseException]()
    relay, inbox = Relay(source, writer, errors.append), RingInbox(reader)
    objects = [("step", number, bytes(size)) for number, size in enumerate([0, 100, 20_000, 3 << 20] * 5)]
    for obj in objects:
        source.put(codec.encode(obj))
    for obj in objects:  # more than the ring has slots: the relay waits there
        assert inbox.dequeue(timeout=DEADLINE_S) == obj
    with pytest.raises(TimeoutError):
        inbox.dequeue(timeout=0.3)
    source.put(None)
    with pytest.raises(ChannelStopped):
        inbox.dequeue(indefinite=True)
    assert relay.join(DEADLINE_S)
    assert not errors
    reader.shutdown()
    writer.shutdown()


@pytest.mark.parametrize("by", ["inbox", "ring"])
def test_shutdown_wakes_the_rank(by: str) -> None:
    writer, reader = ring()
    inbox = RingInbox(reader)
    woken: list[float] = []

    def wait() -> None:
        with pytest.raises(ChannelClosed):
            inbox.dequeue(indefinite=True)
        woken.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.2)
    at = time.monotonic()
    inbox.shutdown()
    if by == "ring":  # as vLLM's WorkerProc does
        reader.shutdown()
    thread.join(DEADLINE_S)
    assert woken[0] - at < 4.0  # vLLM's own reader, not woken, looks again after 5 s
    writer.shutdown()


def test_a_full_ring_holds_only_the_relay_and_shutdown_ends_it() -> None:
    writer, reader = ring(slots=2)
    source, errors = Source(), list[BaseException]()
    relay = Relay(source, writer, errors.append)
    for number in range(10):
        source.put(codec.encode(number))
    assert not relay.join(0.5)
    relay.shutdown()
    assert relay.join(DEADLINE_S)
    assert not errors
    assert RingInbox(reader).dequeue(timeout=DEADLINE_S) == 0
    reader.shutdown()
    writer.shutdown()
