"""The driver's heartbeats: sending never waits, and shows the watcher that the driver makes progress."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from harness.waiting import wait_until
from spmd_serve.liveness import NullStatusEntry
from spmd_serve.wire.frames import Kind
from tests.support.rings import connected

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

DEADLINE_S = 20.0
CHUNK = 1 << 16


class Turns(NullStatusEntry):
    """Counts the turns of a driver."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.state_name = ""

    def turn(self) -> None:
        self.turns += 1

    def state(self, name: str) -> None:
        self.state_name = name


def ring() -> tuple[Any, Any]:
    from spmd_serve.engine.shm_ring import ShmInbox, ShmOutbox

    writer = ShmOutbox(1, CHUNK)
    return connected(writer, ShmInbox(writer.address, 0))


def test_a_busy_rank_does_not_delay_heartbeats_and_then_gets_the_next_batch() -> None:
    """As in a compilation of minutes: nobody reads, the ring is full."""
    from spmd_serve.engine.driver_channel import DriverOutbox, Route

    writer, reader = ring()
    outbox = DriverOutbox([Route(writer)], NullStatusEntry())

    def beat() -> None:
        for _ in range(25):
            outbox.heartbeat()

    beats = threading.Thread(target=beat, daemon=True)
    beats.start()
    beats.join(DEADLINE_S)
    assert not beats.is_alive(), "a heartbeat waits for a busy rank"
    with pytest.raises(TimeoutError):
        outbox.enqueue(("step", (), {}, None), timeout=0.0)
    assert reader.dequeue(timeout=DEADLINE_S) == Kind.HEARTBEAT
    outbox.enqueue(("step", (), {}, None), timeout=DEADLINE_S)
    while (message := reader.dequeue(timeout=DEADLINE_S)) != ("step", (), {}, None):
        assert message == Kind.HEARTBEAT
    outbox.shutdown()


def test_a_driver_that_waits_to_send_does_not_look_hung() -> None:
    from spmd_serve.engine.driver_channel import DriverChannel, DriverOutbox, Route

    writer, reader = ring()
    entry = Turns()
    job: Any = SimpleNamespace(heartbeat_s=0.05, allow_classes=())
    channel = DriverChannel(job, 0, entry)
    channel.outbox = outbox = DriverOutbox([Route(writer)], entry)
    while True:
        try:
            outbox.enqueue(("step", (), {}, None), timeout=0.0)
        except TimeoutError:
            break
    sending = threading.Thread(target=outbox.enqueue, args=(("last", (), {}, None), DEADLINE_S), daemon=True)
    sending.start()
    channel.start_heartbeat()
    channel.ready()
    assert entry.state_name == "ready"
    before = entry.turns
    wait_until(lambda: entry.turns > before + 3, DEADLINE_S, "turns of a driver that sends")
    assert sending.is_alive()
    while reader.dequeue(timeout=DEADLINE_S) != ("last", (), {}, None):
        pass
    sending.join(DEADLINE_S)
    assert not sending.is_alive()
    channel.replies = []
    channel.close(normal=False)
    outbox.shutdown()
