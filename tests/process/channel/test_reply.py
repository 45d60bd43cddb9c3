"""The ranks' answers: who may connect, what arrives in pieces, how each end learns that the other is gone."""

import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from spmd_serve.channel import reply, reply_listener
from spmd_serve.channel.base import ChannelClosed, ChannelStopped
from spmd_serve.channel.reply import ReplyInbox, ReplySender
from spmd_serve.channel.reply_listener import ReplyListener
from spmd_serve.errors import PeerLost
from spmd_serve.wire.codec import RefusedClass
from spmd_serve.wire.frames import BadFrame, FrameReader, FrameWriter, Kind
from tests.support.forked import Children

DEADLINE_S = 20.0
NAMES = {1: "rank 1 on host a", 2: "rank 2 on host b"}


class Listener:
    """A listener that accepts in a thread."""

    def __init__(self, key: bytes | None, ranks: dict[int, str]) -> None:
        self.listener = ReplyListener("127.0.0.1", "run1", key=key)
        self.port = self.listener.port
        self.said: list[str] = []
        self.inside: dict[int, ReplyInbox] = {}
        self.error: BaseException | None = None
        self._ranks = ranks
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        try:
            self.inside = self.listener.accept(self._ranks, DEADLINE_S, self.said.append)
        except BaseException as error:
            self.error = error

    def all_in(self) -> dict[int, ReplyInbox]:
        self._thread.join(DEADLINE_S)
        assert self.error is None, self.error
        assert len(self.inside) == len(self._ranks)
        return self.inside

    def heard(self, text: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not any(text in line for line in self.said):
            assert time.monotonic() < end, f"{text!r} was never said, but {self.said}"
            time.sleep(0.01)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def sender(opened: ExitStack) -> Callable[..., ReplySender]:
    def make(door: Listener, rank: int, nonce: str = "run1", key: bytes | None = None) -> ReplySender:
        made = ReplySender("127.0.0.1", door.port, rank, nonce, key=key, timeout_s=DEADLINE_S)
        opened.callback(made.shutdown)
        return made

    return make


@pytest.fixture
def door(opened: ExitStack) -> Callable[..., Listener]:
    def make(key: bytes | None = None, ranks: dict[int, str] = NAMES) -> Listener:
        made = Listener(key, ranks)

        def close() -> None:
            for inbox in made.inside.values():
                inbox.shutdown()

        opened.callback(close)
        return made

    return make


def raw(port: int, opened: ExitStack) -> socket.socket:
    return opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))


@pytest.mark.parametrize("key", [None, b"secret"])
def test_answers_of_all_sizes_in_any_order_of_ranks(door: Any, sender: Any, key: bytes | None) -> None:
    here = door(key)
    senders = {rank: sender(here, rank, key=key) for rank in (2, 1)}
    inside = here.all_in()
    sizes = [0, 1, 100, 65_000, 66_000, 3 << 20]

    def send(rank: int) -> None:
        for size in sizes:
            senders[rank].enqueue((rank, bytes([rank]) * size))

    threads = [threading.Thread(target=send, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for size in sizes:
        for rank in (2, 1):
            assert inside[rank].dequeue(timeout=DEADLINE_S) == (rank, bytes([rank]) * size)
    for thread in threads:
        thread.join(DEADLINE_S)
    inside[1].wait_until_ready()
    senders[1].wait_until_ready()


def test_a_timeout_in_the_middle_of_an_answer_loses_nothing(door: Any, sender: Any) -> None:
    here = door(ranks={1: NAMES[1]})
    rank = sender(here, 1)
    inbox = here.all_in()[1]
    with pytest.raises(TimeoutError, match="rank 1 on host a"):
        inbox.dequeue(timeout=0.05)
    payload = b"\0\0\0\0" + b"\x80\x05\x8c\x03yes."
    whole = rank._frames.writer.frame(Kind.MESSAGE, [payload]) + payload
    for part in (whole[:5], whole[5:26], whole[26:-1]):
        rank._frames.sock.sendall(part)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                inbox.dequeue(timeout=0.05)
    rank._frames.sock.sendall(whole[-1:])
    assert inbox.dequeue(timeout=DEADLINE_S) == "yes"
    rank.enqueue("next")
    assert inbox.dequeue(indefinite=True) == "next"


def test_a_rank_that_is_killed_is_named(door: Any) -> None:
    here = door(ranks={1: NAMES[1]})

    def rank() -> None:
        end = ReplySender("127.0.0.1", here.port, 1, "run1")
        end.enqueue("last words")
        signal.pause()

    with Children() as children:
        child = children.start(rank)
        inbox = here.all_in()[1]
        assert inbox.dequeue(timeout=DEADLINE_S) == "last words"
        os.kill(child.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(PeerLost, match="lost rank 1 on host a"):
                inbox.dequeue(timeout=DEADLINE_S)
        with pytest.raises(PeerLost, match="rank 1 on host a"):
            for _ in range(100):
                inbox.ring(Kind.MESSAGE)


def test_a_rank_that_leaves_in_order_is_no_lost_peer(door: Any, sender: Any) -> None:
    here = door(ranks={1: NAMES[1]})
    rank = sender(here, 1)
    inbox = here.all_in()[1]
    rank.enqueue("answer")
    rank.shutdown()
    rank.shutdown()
    assert inbox.dequeue(timeout=DEADLINE_S) == "answer"
    with pytest.raises(ChannelStopped, match="rank 1 on host a has left"):
        inbox.dequeue(timeout=DEADLINE_S)
    with pytest.raises(ChannelClosed):
        rank.enqueue("more")


def test_the_driver_is_gone(door: Any, sender: Any) -> None:
    here = door(ranks={1: NAMES[1]})
    rank = sender(here, 1)
    here.all_in()[1].shutdown()
    with pytest.raises(PeerLost, match="lost the driver"):
        rank.doorbell(DEADLINE_S)
    with pytest.raises(PeerLost, match="lost the driver"):
        for _ in range(100):
            rank.enqueue("answer")
    with pytest.raises(PeerLost, match=r"rank 1 cannot reach the driver at 127\.0\.0\.1"):
        sender(here, 1)


@pytest.mark.parametrize("wait", ["dequeue", "enqueue", "doorbell"])
def test_shutdown_wakes_who_waits(door: Any, sender: Any, wait: str) -> None:
    here = door(ranks={1: NAMES[1]})
    rank = sender(here, 1)
    inbox = here.all_in()[1]
    ended: list[Any] = []

    def work() -> None:
        try:
            if wait == "dequeue":
                inbox.dequeue(indefinite=True)
            elif wait == "doorbell":
                rank.doorbell(DEADLINE_S)
            else:
                while True:
                    rank.enqueue(bytes(1 << 20))  # nobody reads
        except ChannelClosed:
            ended.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.3)
    at = time.monotonic()
    (inbox if wait == "dequeue" else rank).shutdown()
    thread.join(DEADLINE_S)
    assert ended[0] - at < 15.0  # not only at the deadline


def test_the_bell(door: Any, sender: Any) -> None:
    here = door(ranks={1: NAMES[1]})
    rank = sender(here, 1)
    inbox = here.all_in()[1]
    assert rank.doorbell(0.05) is None
    for kind in (Kind.MESSAGE, Kind.MESSAGE, Kind.HEARTBEAT, Kind.STOP):
        inbox.ring(kind)
    rung = [rank.doorbell(DEADLINE_S) for _ in range(4)]
    assert rung == [Kind.MESSAGE, Kind.MESSAGE, Kind.HEARTBEAT, Kind.STOP]
    inbox.ring(Kind.HELLO)
    with pytest.raises(BadFrame, match="unknown ring"):
        rank.doorbell(DEADLINE_S)


def hello(rank: object, nonce: str, kind: Kind = Kind.HELLO) -> bytes:
    return raw_hello(json.dumps({"rank": rank, "nonce": nonce}).encode(), kind)


def raw_hello(text: bytes, kind: Kind = Kind.HELLO) -> bytes:
    return FrameWriter(reply.seals(None, "run1", bytes(16))[0]).frame(kind, [text]) + text


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "magic"),
        (hello(1, "run0"), "it is of run 'run0', this is 'run1'"),
        (hello(7, "run1"), "rank 7 is not expected"),
        (hello("x", "run1"), "not a hello"),
        (hello(1.0, "run1"), "not a hello"),
        (hello(True, "run1"), "not a hello"),
        (hello(float("inf"), "run1"), "not a hello"),
        (raw_hello(b'{"rank": 1, "nonce": ["run1"]}'), "not a hello"),
        (raw_hello(b"[" * 4000), "RecursionError"),
        (raw_hello(b"[]"), "not a hello"),
        (raw_hello(b"{}"), "not a hello"),
        (raw_hello(b"\xff"), "not a hello"),
        (raw_hello(b""), "not a hello"),
        (hello(1, "run1", Kind.MESSAGE), "not a hello"),
        (hello(1, "run1")[:24] + b"]" * 64, "not a hello"),
        (hello(1, "x" * 5000), "the limit is 4096"),
        (b"", "it closed the connection"),
    ],
)
def test_strangers_are_dropped_and_told_of(
    door: Any, sender: Any, opened: ExitStack, sent: bytes, why: str
) -> None:
    here = door()
    stranger = raw(here.port, opened)
    stranger.recv(16)
    stranger.sendall(sent)
    if not sent:
        stranger.shutdown(socket.SHUT_WR)
    here.heard(why)
    assert "dropped a connection from 127.0.0.1:" in here.said[0]
    assert stranger.recv(1) == b""
    for rank in (1, 2):
        sender(here, rank).enqueue("in")
    assert [inbox.dequeue(DEADLINE_S) for inbox in here.all_in().values()] == ["in", "in"]


def test_a_silent_stranger_holds_nobody_up(
    door: Any, sender: Any, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_listener, "_HELLO_S", 0.2)
    here = door()
    silent = raw(here.port, opened)
    silent.recv(16)
    monkeypatch.undo()  # ranks may be slower
    sender(here, 1)
    here.heard("it did not authenticate within ")
    assert silent.recv(1) == b""
    sender(here, 2)
    here.all_in()


def test_an_unforeseen_error_of_a_handler_closes_its_connection_only(
    door: Any, sender: Any, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrameReader, "header", lambda self, raw: 1 // 0)
    here = door()
    peer = raw(here.port, opened)
    peer.recv(16)
    peer.sendall(hello(1, "run1"))
    here.heard("ZeroDivisionError")
    monkeypatch.undo()
    for rank in (1, 2):
        sender(here, rank)
    here.all_in()


def test_the_oldest_pending_connection_goes_when_there_are_too_many(
    door: Any, sender: Any, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_listener, "_MAX_PENDING", 3)
    monkeypatch.setattr(reply_listener, "_HELLO_S", DEADLINE_S)
    here = door()
    idle = [raw(here.port, opened) for _ in range(6)]
    for number in range(3):
        idle[number].recv(16)
        assert idle[number].recv(1) == b""
    here.heard("more than 3 have not authenticated")
    for rank in (1, 2):
        sender(here, rank)
    here.all_in()


def test_accept_without_free_descriptors_is_reported_once_and_retried() -> None:
    listener = ReplyListener("127.0.0.1", "run1")
    real, failures = listener._listener, 0

    class Short:
        def accept(self) -> Any:
            nonlocal failures
            failures += 1
            if failures < 10:
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        def close(self) -> None:
            real.close()

    listener._listener = Short()  # type: ignore[assignment]
    said: list[str] = []
    senders: list[ReplySender] = []
    thread = threading.Thread(
        target=lambda: senders.append(ReplySender("127.0.0.1", listener.port, 1, "run1"))
    )
    thread.start()
    begun = time.process_time()
    (inbox,) = listener.accept({1: NAMES[1]}, DEADLINE_S, said.append).values()
    assert time.process_time() - begun < 0.5
    thread.join(DEADLINE_S)
    assert said == ["cannot accept a connection to the driver, trying again: [Errno 24] Too many open files"]
    inbox.shutdown()
    senders[0].shutdown()


def test_an_announced_length_takes_no_memory(door: Any, sender: Any) -> None:
    here = door(ranks={1: NAMES[1]})
    rank = sender(here, 1)
    inbox = here.all_in()[1]
    rank._frames.sock.sendall(rank._frames.writer._header(Kind.MESSAGE, 1 << 30) + bytes(100_000))
    with pytest.raises(TimeoutError):
        inbox.dequeue(timeout=0.5)
    assert len(inbox._frames._buffer) == reply._FIRST_PIECE_BYTES


def test_a_rank_comes_in_once_and_the_door_shuts(door: Any, sender: Any) -> None:
    here = door()
    sender(here, 1)
    with pytest.raises(PeerLost, match="did not take rank 1"):
        sender(here, 1)
    here.heard("rank 1 is not expected")
    sender(here, 2)
    here.all_in()
    with pytest.raises(PeerLost, match="cannot reach"):
        sender(here, 2)


def test_another_key_is_refused_at_both_ends(door: Any, sender: Any) -> None:
    here = door(b"secret", {1: NAMES[1]})
    for key in (b"other", None):
        with pytest.raises(PeerLost, match="is the control key the same on every host"):
            sender(here, 1, key=key)
    here.heard("signature is wrong")
    here.heard("this side has one, the other has none: give every host the same control key")
    rank = sender(here, 1, key=b"secret")
    inbox = here.all_in()[1]
    rank._frames.writer.seq = 1
    rank._frames.writer.seal = reply.seals(b"secret", "run1", bytes(16))[0]
    rank.enqueue("signed for another connection")
    with pytest.raises(BadFrame, match="rank 1 on host a: its signature is wrong"):
        inbox.dequeue(timeout=DEADLINE_S)


def test_a_hello_that_was_listened_to_cannot_be_used_again(door: Any, opened: ExitStack, sender: Any) -> None:
    here = door(b"secret")
    first = raw(here.port, opened)
    challenge = first.recv(16)
    text = json.dumps({"rank": 1, "nonce": "run1"}).encode()
    answer = FrameWriter(reply.seals(b"secret", "run1", challenge)[0]).frame(Kind.HELLO, [text]) + text
    second = raw(here.port, opened)
    assert second.recv(16) != challenge
    second.sendall(answer)
    here.heard("signature is wrong")
    first.sendall(answer)  # whom it was meant for
    sender(here, 2, key=b"secret")
    here.all_in()


def test_a_driver_without_the_key_is_not_believed(opened: ExitStack) -> None:
    listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(bytes(16))
            sock.recv(1000)
            sock.sendall(FrameWriter(reply.seals(b"guess", "run1", bytes(16))[1]).frame(Kind.WELCOME))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(BadFrame, match="the driver: its signature is wrong"):
        ReplySender("127.0.0.1", listener.getsockname()[1], 1, "run1", key=b"secret", timeout_s=DEADLINE_S)
    thread.join(DEADLINE_S)


def test_missing_ranks_are_named(opened: ExitStack) -> None:
    listener = ReplyListener("127.0.0.1", "run1")
    with pytest.raises(PeerLost, match=r"within 0\.2 s: rank 1 on host a, rank 2 on host b"):
        listener.accept(NAMES, 0.2, print)


def test_refused_classes_and_what_is_no_answer(door: Any, sender: Any) -> None:
    here = door(ranks={1: NAMES[1]})
    rank = sender(here, 1)
    inbox = here.all_in()[1]
    with pytest.raises(RefusedClass):
        rank.enqueue(os.system)
    rank._frames.send(Kind.MESSAGE, [b"\0\0\0\0cposix\nsystem\n(S'true'\ntR."])
    with pytest.raises(RefusedClass, match="posix:system"):
        inbox.dequeue(timeout=DEADLINE_S)
    rank.enqueue("fine")
    assert inbox.dequeue(timeout=DEADLINE_S) == "fine"
    rank._frames.send(Kind.BIG, [])
    with pytest.raises(BadFrame, match="BIG has no place here"):
        inbox.dequeue(timeout=DEADLINE_S)
