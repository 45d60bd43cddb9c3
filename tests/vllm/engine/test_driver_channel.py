"""The driver's heartbeats: they wait for nobody, and say to the watcher that the driver itself turns."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_serve.liveness import NullStatusEntry
from tests.support.rings import connected
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

DEADLINE_S = 20.0
CHUNK = 1 << 16


class Turns(NullStatusEntry):
    """Counts the turns of a driver."""

    def __init__(self) -> None:
        self.turns = 0
        self.state_name = ""

    def turn(self) -> None:
        self.turns += 1

    def state(self, name: str) -> None:
        self.state_name = name


def ring() -> tuple[Any, Any]:
    from spmd_serve.engine.shm_ring import RingInbox, RingOutbox

    writer = RingOutbox(1, CHUNK)
    return connected(writer, RingInbox(writer.address, 0))


def test_a_busy_rank_does_not_hold_up_heartbeats_and_then_hears_the_next_batch() -> None:
    """As in a compilation of minutes: nobody reads, the ring is full."""
    from spmd_serve.engine.driver_channel import DriverOutbox
    from spmd_serve.engine.worker_channel import HEARTBEAT

    writer, reader = ring()
    outbox = DriverOutbox([writer], NullStatusEntry())

    def beat() -> None:
        for _ in range(25):
            outbox.heartbeat()

    beats = threading.Thread(target=beat, daemon=True)
    beats.start()
    beats.join(DEADLINE_S)
    assert not beats.is_alive(), "a heartbeat waits for a rank that is busy"
    with pytest.raises(TimeoutError):
        outbox.enqueue(("step", (), {}, None), timeout=0.0)
    assert reader.dequeue(timeout=DEADLINE_S)[0] == HEARTBEAT
    outbox.enqueue(("step", (), {}, None), timeout=DEADLINE_S)
    names: list[str] = []
    while names[-1:] != ["step"]:
        names.append(reader.dequeue(timeout=DEADLINE_S)[0])
    assert set(names[:-1]) == {HEARTBEAT}
    outbox.shutdown()


def test_a_message_that_waits_for_a_place_does_not_make_the_driver_look_hung() -> None:
    from spmd_serve.engine.driver_channel import DriverChannel, DriverOutbox

    writer, reader = ring()
    entry = Turns()
    channel: Any = DriverChannel.__new__(DriverChannel)
    channel._entry, channel._ended, channel.threads = entry, threading.Event(), []
    channel._spec = SimpleNamespace(heartbeat_s=0.05)
    channel.outbox = outbox = DriverOutbox([writer], entry)
    while True:
        try:
            outbox.enqueue(("step", (), {}, None), timeout=0.0)
        except TimeoutError:
            break
    sending = threading.Thread(target=outbox.enqueue, args=(("last", (), {}, None), DEADLINE_S), daemon=True)
    sending.start()
    channel.start_heartbeat()
    channel.loaded()
    assert entry.state_name == "ready"
    before = entry.turns
    wait_until(lambda: entry.turns > before + 3, DEADLINE_S, "turns of a driver that sends")
    assert sending.is_alive()
    while reader.dequeue(timeout=DEADLINE_S)[0] != "last":
        pass
    sending.join(DEADLINE_S)
    assert not sending.is_alive()
    channel._ended.set()
    for thread in channel.threads:
        thread.join(DEADLINE_S)
    outbox.shutdown()
