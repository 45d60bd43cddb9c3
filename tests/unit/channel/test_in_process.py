"""The way between a driver and its own shard."""

import threading

import pytest

from spmd_serve.channel.base import ChannelClosed
from spmd_serve.channel.in_process import LocalQueue, OwnLine

DEADLINE_S = 10.0


@pytest.mark.parametrize("copies", [False, True])
def test_objects_arrive_in_order(copies: bool) -> None:
    line = OwnLine(copies)
    objects = [("a", [1, 2]), None, {"x": 1}]
    for obj in objects:
        line.messages.enqueue(obj)
    arrived = [line.messages.dequeue(timeout=DEADLINE_S) for _ in objects]
    assert arrived == objects
    assert (arrived[0] is objects[0]) is not copies


def test_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        LocalQueue(False).dequeue(timeout=0.01)


def test_shutdown_wakes_who_waits_after_what_was_sent_before() -> None:
    queue = LocalQueue(False)
    heard: list[object] = []

    def read() -> None:
        try:
            while True:
                heard.append(queue.dequeue(indefinite=True))
        except ChannelClosed as closed:
            heard.append(type(closed))

    thread = threading.Thread(target=read)
    thread.start()
    queue.enqueue("last")
    queue.shutdown()
    thread.join(DEADLINE_S)
    assert heard == ["last", ChannelClosed]
    with pytest.raises(ChannelClosed):
        queue.dequeue(timeout=0.0)
