"""The driver's messages to the ranks, over each of the channel's shapes, with real processes over gloo."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from harness.waiting import wait_until
from spmd_serve.channel.base import ChannelClosed, ChannelStopped, PeerSilent
from spmd_serve.channel.broadcast import BroadcastOutbox
from spmd_serve.channel.gloo import open_outbox
from spmd_serve.errors import PeerLost, SpmdError, UsageError
from spmd_serve.wire.codec import RefusedClass
from spmd_serve.wire.frames import BadFrame, MessageTooLong, Seal
from tests.support.channels import DEADLINE_S, RIGS, GlooRig, Rig, content, digest, sizes
from tests.support.forked import Child, Children, store_server

Make = Callable[..., Rig]
LATE_S = 15.0
"""What happens at once happens sooner, on a starved machine too; what happens at a deadline does not."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with store_server() as (_, port):
        yield port


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as children:
        yield children


_numbers = iter(range(10_000))


@pytest.fixture(params=RIGS)
def make(request: pytest.FixtureRequest, port: int) -> Iterator[Make]:
    """Makes a channel of the shape under test, with a name of its own."""
    yield from _maker(RIGS[request.param], port)


@pytest.fixture
def make_gloo(port: int) -> Iterator[Make]:
    yield from _maker(GlooRig, port)


def _maker(shape: type[Rig], port: int) -> Iterator[Make]:
    made: list[Rig] = []

    def make(**more: Any) -> Rig:
        made.append(shape(port, f"channel{next(_numbers)}", **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def start(
    children: Children, rig: Rig, rank: Callable[[int, Any], object], *, together: bool = True
) -> list[Child]:
    """A process per rank that opens its inbox and runs `rank(number, inbox)`.

    `together`: none leaves before all are through, for who has left is a lost peer to the others.
    """

    def run(number: int) -> object:
        result = rank(number, rig.inbox(number))
        if together:
            tell(rig, number, "through")
            until_all_ended(rig, "through")
        return result

    return [children.start(lambda number=number: run(number)) for number in rig.ranks]  # type: ignore[misc]


def drive(children: Children, rig: Rig, driver: Callable[[Any], object]) -> Child:
    return children.start(lambda: driver(rig.outbox()))


def take(inbox: Any, count: int) -> list[Any]:
    return [inbox.dequeue(DEADLINE_S) for _ in range(count)]


def the_end(inbox: Any) -> str:
    """The name of the error that ends the channel."""
    try:
        inbox.dequeue(DEADLINE_S)
    except SpmdError as error:
        return type(error).__name__
    return "a message"


def say_error(inbox: Any) -> list[str]:
    try:
        return ["a message", repr(inbox.dequeue(DEADLINE_S))[:100]]
    except SpmdError as error:
        return [type(error).__name__, str(error)]


def until_all_ended(rig: Rig, name: str, ranks: Sequence[int] = ()) -> None:
    """Wait, in one of the processes, until the ranks (all) have said in the store that they are `name`."""
    store = rig.store()
    for rank in ranks or rig.ranks:
        store.get(f"{rig.spec.name}/{name}/{rank}")


def tell(rig: Rig, rank: int, name: str) -> None:
    rig.store().set(f"{rig.spec.name}/{name}/{rank}", "1")


def tell_all(rig: Rig, name: str) -> None:
    for rank in rig.ranks:
        tell(rig, rank, name)


def stay(_: object) -> None:
    """A process that leaves closes its connections, which the others would notice."""
    signal.pause()


@pytest.mark.parametrize("key", [None, b"secret"])
def test_500_messages_of_all_sizes_keep_their_order_and_then_stop(
    make: Make, children: Children, key: bytes | None
) -> None:
    rig = make(key=key)

    def driver(outbox: Any) -> None:
        outbox.wait_until_ready()
        for number, size in enumerate(sizes(500)):
            outbox.enqueue(("method", (content(number, size),), {}, None))
        outbox.shutdown()
        outbox.shutdown()
        with pytest.raises(ChannelClosed):
            outbox.enqueue("after the end")

    def rank(_: int, inbox: Any) -> list[Any]:
        inbox.wait_until_ready()
        got = digest([message[1][0] for message in take(inbox, 500)])
        ends = [the_end(inbox), the_end(inbox)]
        inbox.shutdown()
        return [got, ends]

    ranks = start(children, rig, rank)
    drive(children, rig, driver).result()
    expected = digest([content(number, size) for number, size in enumerate(sizes(500))])
    for child in ranks:
        assert child.result() == [expected, ["ChannelStopped", "ChannelStopped"]]


def test_tensors_cross(make: Make, children: Children) -> None:
    rig = make()

    def driver(outbox: Any) -> None:
        torch.set_num_threads(1)  # OpenMP's threads are not there after a fork
        outbox.enqueue([torch.arange(5, dtype=torch.bfloat16), torch.ones(300, 300)])
        until_all_ended(rig, "done")

    def rank(number: int, inbox: Any) -> list[Any]:
        torch.set_num_threads(1)
        small, big = inbox.dequeue(DEADLINE_S)
        big.add_(1)  # a received tensor may be written
        tell(rig, number, "done")
        return [str(small.dtype), small.tolist(), float(big.sum())]

    ranks = start(children, rig, rank)
    drive(children, rig, driver).result()
    for child in ranks:
        assert child.result() == ["torch.bfloat16", [0, 1, 2, 3, 4], 180_000]


def test_frames_posted_ahead_take_messages_while_ranks_are_busy(make: Make, children: Children) -> None:
    rig = make()

    def driver(outbox: Any) -> float:
        started = time.monotonic()
        for number in range(rig.spec.depth):
            outbox.enqueue(number, timeout=5.0)
        took = time.monotonic() - started
        rig.store().set(f"{rig.spec.name}/sent", "1")
        until_all_ended(rig, "done")
        return took

    def rank(number: int, inbox: Any) -> list[Any]:
        rig.store().get(f"{rig.spec.name}/sent")  # busy: reads only after all are sent
        got = take(inbox, rig.spec.depth)
        tell(rig, number, "done")
        return got

    ranks = start(children, rig, rank)
    assert drive(children, rig, driver).result() < LATE_S
    for child in ranks:
        assert child.result() == [0, 1, 2, 3]


def test_a_send_that_nobody_takes_fails_at_its_deadline_and_loses_nothing(
    make_gloo: Make, children: Children
) -> None:
    rig = make_gloo()

    def driver(outbox: Any) -> int:
        sent = 0
        with pytest.raises(
            PeerSilent, match=r"4 control frames .*rank 0 on host a, rank 1 on host b"
        ) as caught:
            while sent < 100:
                outbox.enqueue(sent, timeout=4.0)
                sent += 1
        assert isinstance(caught.value, TimeoutError)
        rig.store().set(f"{rig.spec.name}/sent", str(sent))
        outbox.enqueue("more")
        outbox.shutdown()
        return sent

    def rank(_: int, inbox: Any) -> list[Any]:
        sent = int(rig.store().get(f"{rig.spec.name}/sent"))
        return take(inbox, sent + 1)

    ranks = start(children, rig, rank)
    sent = drive(children, rig, driver).result()
    assert sent == 2 * rig.spec.depth
    for child in ranks:
        assert child.result() == [*range(sent), "more"]


def test_heartbeats_are_seen_but_are_no_messages_and_never_wait(make: Make, children: Children) -> None:
    rig = make()

    def driver(outbox: Any) -> list[bool]:
        beats = [outbox.heartbeat() for _ in range(30)]  # nobody reads yet
        outbox.enqueue("message", timeout=5.0)
        rig.store().set(f"{rig.spec.name}/sent", "1")
        until_all_ended(rig, "done")
        return beats

    def rank(number: int) -> list[Any]:
        beats: list[int] = []
        inbox = rig.inbox(number, lambda: beats.append(1))
        rig.store().get(f"{rig.spec.name}/sent")
        got = inbox.dequeue(DEADLINE_S)
        tell(rig, number, "done")
        until_all_ended(rig, "done")
        return [got, len(beats)]

    ranks = [children.start(lambda number=number: rank(number)) for number in rig.ranks]  # type: ignore[misc]
    beats = sum(drive(children, rig, driver).result())
    assert beats >= 1
    for number, child in zip(rig.ranks, ranks, strict=True):
        assert child.result() == ["message", beats if number in rig.hears else 0]


def test_shutdown_wakes_a_waiting_rank(make: Make, children: Children) -> None:
    rig = make()

    def rank(_: int, inbox: Any) -> list[Any]:
        woken: list[Any] = []

        def wait() -> None:
            try:
                inbox.dequeue(indefinite=True)
            except ChannelClosed as error:
                woken.extend([type(error).__name__, time.monotonic()])

        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.2)  # by then it waits
        at = time.monotonic()
        inbox.shutdown()
        waiter.join(DEADLINE_S)
        inbox.shutdown()
        return [woken[0], woken[1] - at < LATE_S, the_end(inbox)]

    ranks = start(children, rig, rank)
    drive(children, rig, stay)
    for child in ranks:
        assert child.result() == ["ChannelClosed", True, "ChannelClosed"]


def test_a_signal_handler_can_end_the_wait(make: Make, children: Children) -> None:
    rig = make()

    def rank(number: int, inbox: Any) -> str:
        signal.signal(signal.SIGTERM, lambda *_: inbox.shutdown())
        tell(rig, number, "ready")
        return the_end(inbox)

    ranks = start(children, rig, rank)
    drive(children, rig, stay)
    children.start(lambda: until_all_ended(rig, "ready")).result()
    at = time.monotonic()
    for child in ranks:
        os.kill(child.pid, signal.SIGTERM)
    assert [child.result() for child in ranks] == ["ChannelClosed"] * len(ranks)
    assert time.monotonic() - at < LATE_S


def test_idle_for_longer_than_the_groups_timeout(make: Make, children: Children) -> None:
    rig = make()
    rig.join_timeout_s = 6.0  # also the timeout that gloo has while it connects

    def driver(outbox: Any) -> None:
        until_all_ended(rig, "waited")
        outbox.enqueue("good morning")
        until_all_ended(rig, "done")

    def rank(number: int, inbox: Any) -> object:
        with pytest.raises(TimeoutError):
            inbox.dequeue(timeout=7.0)
        tell(rig, number, "waited")
        got = inbox.dequeue(DEADLINE_S)
        tell(rig, number, "done")
        return got

    started = drive(children, rig, driver)
    ranks = start(children, rig, rank)
    assert [child.result() for child in ranks] == ["good morning"] * len(ranks)
    started.result()


def test_a_killed_rank_does_not_hold_anybody_for_ever(make: Make, children: Children) -> None:
    rig = make()

    def driver(outbox: Any) -> float:
        outbox.enqueue("hello")
        until_all_ended(rig, "killed")
        end = time.monotonic() + 3.0
        with suppress(PeerLost, TimeoutError):
            while time.monotonic() < end:
                outbox.enqueue(bytes(100), timeout=1.0)
                time.sleep(0.01)
        at = time.monotonic()
        outbox.shutdown()
        return time.monotonic() - at

    def rank(number: int, inbox: Any) -> str:
        inbox.dequeue(DEADLINE_S)
        tell(rig, number, "ready")
        timer = threading.Timer(5.0, inbox.shutdown)
        timer.start()
        with pytest.raises((PeerLost, ChannelClosed)):
            while True:
                inbox.dequeue(DEADLINE_S)
        timer.cancel()
        return "out"

    ranks = start(children, rig, rank, together=False)
    sender = drive(children, rig, driver)
    children.start(lambda: until_all_ended(rig, "ready")).result()
    os.kill(ranks[-1].pid, signal.SIGKILL)
    ranks[-1].wait_killed()
    children.start(lambda: tell_all(rig, "killed")).result()
    assert sender.result() < LATE_S
    for child in ranks[:-1]:
        assert child.result() == "out"


def test_ranks_notice_that_their_driver_was_killed(make_gloo: Make, children: Children) -> None:
    rig = make_gloo()

    def rank(number: int, inbox: Any) -> list[str]:
        inbox.dequeue(DEADLINE_S)
        tell(rig, number, "ready")
        return say_error(inbox)

    ranks = start(children, rig, rank)
    sender = drive(children, rig, lambda outbox: stay(outbox.enqueue("hello")))
    children.start(lambda: until_all_ended(rig, "ready")).result()
    os.kill(sender.pid, signal.SIGKILL)
    for child in ranks:
        name, text = child.result()
        assert name == "PeerLost"
        assert "the driver" in text


def tamper_number(outbox: BroadcastOutbox) -> None:
    outbox.writer.seq = 5


def tamper_header(outbox: BroadcastOutbox) -> None:
    outbox.writer.frame = lambda kind, parts=(): b"GET / HTTP/1.1\r\n".ljust(outbox.writer.overhead)  # type: ignore[method-assign]


def tamper_limit(outbox: BroadcastOutbox) -> None:
    outbox.writer.max_bytes = 1 << 40


def tamper_key(outbox: BroadcastOutbox) -> None:
    outbox.writer.seal = Seal(b"another secret", outbox._spec.round_id, outbox._spec.name)


@pytest.mark.parametrize(
    ("tamper", "key", "size", "why"),
    [
        (tamper_number, None, 10, "sequence number 5 where 0 was due"),
        (tamper_header, None, 10, "magic"),
        (tamper_limit, None, 200_000, "the limit is 100000"),
        (tamper_key, b"secret", 10, "signature is wrong"),
        (tamper_key, b"secret", 50_000, "signature is wrong"),
    ],
    ids=["number", "garbage", "oversize", "key", "key of a long message"],
)
def test_bad_frames_end_the_channel(
    make: Make, children: Children, tamper: Any, key: bytes | None, size: int, why: str
) -> None:
    rig = make(tamper=tamper, key=key, max_bytes=100_000)

    def rank(number: int, inbox: Any) -> list[str]:
        if number not in rig.hears:
            signal.pause()  # its process would be ended by its host's leader
        error = say_error(inbox)
        tell(rig, number, "through")
        until_all_ended(rig, "through", rig.hears)
        return error

    ranks = start(children, rig, rank, together=False)
    drive(children, rig, lambda outbox: stay(outbox.enqueue_encoded(bytes(size))))
    for number in rig.hears:
        name, text = ranks[rig.ranks.index(number)].result()
        assert name == BadFrame.__name__
        assert why in text
        assert rig.members[0] in text


def test_the_sender_refuses_too_long_messages_and_goes_on(make_gloo: Make, children: Children) -> None:
    rig = make_gloo(max_bytes=1000)

    def driver(outbox: Any) -> None:
        with pytest.raises(MessageTooLong):
            outbox.enqueue(bytes(2000))
        with pytest.raises(RefusedClass):
            outbox.enqueue(os.system)
        outbox.enqueue("fine")
        outbox.shutdown()

    ranks = start(children, rig, lambda _, inbox: take(inbox, 1))
    drive(children, rig, driver).result()
    assert [child.result() for child in ranks] == [["fine"]] * 2


def test_a_refused_class_does_not_get_in(make: Make, children: Children) -> None:
    rig = make()

    def driver(outbox: Any) -> None:
        outbox.enqueue_encoded(b"\0\0\0\0cposix\nsystem\n(S'true'\ntR.")
        outbox.enqueue("fine")
        until_all_ended(rig, "done")

    def rank(number: int, inbox: Any) -> list[Any]:
        refused, fine = say_error(inbox), inbox.dequeue(DEADLINE_S)
        tell(rig, number, "done")
        return [refused, fine]

    ranks = start(children, rig, rank)
    drive(children, rig, driver).result()
    for child in ranks:
        (name, text), fine = child.result()
        assert (name, fine) == ("RefusedClass", "fine")
        assert "posix:system" in text


def test_two_channels_in_one_store(make: Make, children: Children) -> None:
    rigs = [make(), make(depth=2)]

    def both(open_end: Callable[[Rig], Any]) -> list[Any]:
        ends: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda place=place, rig=rig: ends.update({place: open_end(rig)}))
            for place, rig in enumerate(rigs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        return [ends[0], ends[1]]

    def driver() -> None:
        first, second = both(lambda rig: rig.outbox())
        for number in range(20):
            first.enqueue(number)
            second.enqueue(bytes(number * 4000))
        first.shutdown()
        second.shutdown()

    def rank(number: int) -> list[Any]:
        first, second = both(lambda rig: rig.inbox(number))
        got = [(*take(first, 1), len(*take(second, 1))) for _ in range(20)]
        tell(rigs[0], number, "through")
        until_all_ended(rigs[0], "through")
        return [list(pair) for pair in zip(*got, strict=True)]

    ranks = [children.start(lambda number=number: rank(number)) for number in rigs[0].ranks]  # type: ignore[misc]
    children.start(driver).result()
    for child in ranks:
        assert child.result() == [list(range(20)), [number * 4000 for number in range(20)]]


def test_members_with_other_terms_are_told_so(make_gloo: Make, children: Children) -> None:
    rig = make_gloo()
    other = GlooRig(rig._port, rig.spec.name, depth=7)

    def opens(end: Callable[[], Any]) -> str:
        try:
            end()
        except UsageError as error:
            return str(error)
        return "opened"

    ends = [
        children.start(lambda: opens(rig.outbox)),
        children.start(lambda: opens(lambda: rig.inbox(0))),
        children.start(lambda: opens(lambda: other.inbox(1))),
    ]
    for end in ends:
        text = end.result()
        assert "7 ahead" in text
        assert "4 ahead" in text


def test_a_member_that_does_not_come_is_named(make_gloo: Make, children: Children) -> None:
    rig = make_gloo()
    rig.join_timeout_s = 0.5

    def driver() -> str:
        with pytest.raises(PeerLost) as caught:
            rig.outbox()
        return str(caught.value)

    children.start(lambda: say_error(rig.inbox(0)))
    text = children.start(driver).result()
    assert "rank 1 on host b" in text
    assert rig.spec.name in text


def test_an_interface_that_is_not_there_is_a_usage_error(make_gloo: Make, children: Children) -> None:
    rig = make_gloo()

    def driver() -> str:
        with pytest.raises(UsageError) as caught:
            open_outbox(rig.store(), rig.spec, interface="eth77")
        return str(caught.value)

    for number in rig.ranks:
        children.start(lambda number=number: say_error(rig.inbox(number)))  # type: ignore[misc]
    assert "eth77" in children.start(driver).result()


def test_beside_a_default_group(make_gloo: Make, children: Children) -> None:
    rig = make_gloo()

    def driver() -> bool:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=rig.store(), rank=0, world_size=1)
        before = dist.group.WORLD
        outbox = rig.outbox()
        outbox.enqueue("fine")
        outbox.shutdown()
        return dist.group.WORLD is before

    def rank(_: int, inbox: Any) -> list[Any]:
        import torch.distributed as dist

        return [take(inbox, 1), dist.is_initialized()]

    ranks = start(children, rig, rank)
    assert children.start(driver).result() is True
    assert [child.result() for child in ranks] == [[["fine"], False]] * 2


EXIT = """
import threading, sys
from torch.distributed import TCPStore
from spmd_serve.channel.base import ChannelSpec
from spmd_serve.channel.gloo import open_inbox, open_outbox

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", store.port, is_master=False)
spec = ChannelSpec("control", ("the driver", "rank 0"), "run1")
opened = {}
thread = threading.Thread(target=lambda: opened.update(inbox=open_inbox(client, spec, 1, interface="lo")))
thread.start()
outbox = open_outbox(store, spec, interface="lo")
thread.join()
outbox.enqueue("hello")
assert opened["inbox"].dequeue(10) == "hello"
if "stop" in sys.argv:
    outbox.shutdown()
    opened["inbox"].shutdown()
"""


@pytest.mark.parametrize("how", ["stop", "just end"])
def test_both_ends_in_one_process_that_ends_normally(how: str) -> None:
    """Receives that are posted still must not hold the end of the interpreter."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXIT, how],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_stopped_channel_gives_its_threads_back(make_gloo: Make, children: Children) -> None:
    rig = make_gloo()

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def ended(before: int) -> bool:
        # The store's client may have one; a joined thread may be listed for a moment more.
        return wait_until(lambda: threads() <= before + 1, DEADLINE_S, "the threads to end")

    def driver() -> bool:
        before = threads()
        outbox = rig.outbox()
        outbox.enqueue("hello")
        outbox.shutdown()
        return ended(before)

    def rank(number: int) -> list[Any]:
        before = threads()
        inbox = rig.inbox(number)
        got = take(inbox, 1)
        with pytest.raises(ChannelStopped):
            inbox.dequeue(DEADLINE_S)
        inbox.shutdown()
        return [got, ended(before)]

    ranks = [children.start(lambda number=number: rank(number)) for number in rig.ranks]  # type: ignore[misc]
    assert children.start(driver).result() is True
    assert [child.result() for child in ranks] == [[["hello"], True]] * 2
