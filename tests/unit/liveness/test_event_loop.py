"""Connections and listeners of the watcher's loop: what a handler raises stays in its connection."""

import errno
import socket
from collections.abc import Iterator

import pytest

from spmd_serve.liveness.event_loop import Connection, Listener, Loop
from spmd_serve.wire.lines import unpack

LIMIT_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def turn(loop: Loop, timeout_s: float = LIMIT_S) -> None:
    for call in loop.wait(timeout_s):
        call()


@pytest.mark.parametrize(
    "line",
    [
        b'{"t":"hello","node":Infinity}',
        b'{"t":"hello","node":1e999}',
        b'{"t":"hello","node":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"t":' * 5000,
        b'{"t":["hello"],"node":1}',
        b'{"t":"hello","node":{}}',
        b'{"t":"hello"}',
        b"null",
        b"\xff\xfe",
    ],
)
def test_a_bad_line_closes_its_connection_only(
    line: bytes, pair: tuple[socket.socket, socket.socket]
) -> None:
    loop, reasons = Loop(), list[str]()

    def on_line(received: bytes) -> None:
        int(unpack(received)["node"])

    connection = Connection(loop, pair[0], on_line, reasons.append)
    pair[1].sendall(line + b"\n")
    while connection.is_open:
        turn(loop)
    assert len(reasons) == 1 and reasons[0]
    assert pair[1].recv(1) == b""


@pytest.mark.parametrize(
    "error", [OverflowError(), RecursionError(), TypeError(), MemoryError(), KeyError("x")]
)
def test_whatever_a_handler_raises_stays_in_its_connection(
    error: Exception, pair: tuple[socket.socket, socket.socket]
) -> None:
    loop, reasons = Loop(), list[str]()

    def on_line(received: bytes) -> None:
        raise error

    connection = Connection(loop, pair[0], on_line, reasons.append)
    pair[1].sendall(b"x\n")
    turn(loop)
    assert not connection.is_open and type(error).__name__ in reasons[0]


def test_a_last_answer_is_sent_whole_and_nothing_more_is_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    loop, lines = Loop(), list[bytes]()
    answer = b"a" * 5_000_000

    def on_line(received: bytes) -> None:
        lines.append(received)
        connection.send_last(answer)

    connection = Connection(loop, pair[0], on_line, lambda reason: None)
    pair[1].settimeout(LIMIT_S)
    pair[1].sendall(b"1\n2\n3\n")
    received = 0
    turn(loop)
    while connection.is_open or received < len(answer):
        turn(loop, 0.0)
        data = pair[1].recv(1 << 20)
        assert data
        received += len(data)
    assert lines == [b"1"] and received == len(answer) and pair[1].recv(1) == b""


def test_without_descriptors_a_listener_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, accepted = Loop(), list[socket.socket]()
    listening = socket.create_server(("127.0.0.1", 0))
    listener = Listener(loop, listening, accepted.append)
    real = socket.socket.accept

    def no_more(_sock: socket.socket) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")

    with socket.create_connection(listening.getsockname()):
        monkeypatch.setattr(socket.socket, "accept", no_more)
        turn(loop)
        assert loop.wait(0.0) == []  # it does not spin
        monkeypatch.setattr(socket.socket, "accept", real)
        listener.resume()
        turn(loop)
        assert len(accepted) == 1
    accepted[0].close()
    listener.close()


def test_an_exception_while_accepting_closes_the_new_connection() -> None:
    loop = Loop()

    def refuse(_sock: socket.socket) -> None:
        raise ValueError("no")

    listening = socket.create_server(("127.0.0.1", 0))
    listener = Listener(loop, listening, refuse)
    with socket.create_connection(listening.getsockname(), timeout=LIMIT_S) as client:
        turn(loop)
        assert client.recv(1) == b""
    listener.close()
