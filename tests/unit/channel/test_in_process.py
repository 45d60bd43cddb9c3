"""The queues between a driver and the rank in its process."""

import threading

import pytest

from spmd_serve.channel.base import ChannelClosed
from spmd_serve.channel.in_process import InProcessChannel, LocalQueue

DEADLINE_S = 10.0


@pytest.mark.parametrize("copies", [False, True])
def test_objects_arrive_in_order(copies: bool) -> None:
    channel = InProcessChannel(copies)
    objects = [("a", [1, 2]), None, {"x": 1}]
    for obj in objects:
        channel.messages.enqueue(obj)
    arrived = [channel.messages.dequeue(timeout=DEADLINE_S) for _ in objects]
    assert arrived == objects
    assert (arrived[0] is objects[0]) is not copies


def test_dequeue_times_out() -> None:
    with pytest.raises(TimeoutError):
        LocalQueue(False).dequeue(timeout=0.01)


def test_shutdown_wakes_the_reader_after_the_messages_sent_before() -> None:
    queue = LocalQueue(False)
    received: list[object] = []

    def read() -> None:
        try:
            while True:
                received.append(queue.dequeue(indefinite=True))
        except ChannelClosed as closed:
            received.append(type(closed))

    thread = threading.Thread(target=read)
    thread.start()
    queue.enqueue("last")
    queue.shutdown()
    thread.join(DEADLINE_S)
    assert received == ["last", ChannelClosed]
    with pytest.raises(ChannelClosed):
        queue.dequeue(timeout=0.0)
