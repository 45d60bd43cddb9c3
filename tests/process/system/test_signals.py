"""SIGTERM and SIGINT are heard whatever the main thread does."""

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator

import pytest

from spmd_serve.system.signals import forget_ending_signals, on_ending_signal
from tests.support.forked import DEADLINE_S, Children

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_word(reader: int) -> bytes:
    assert select.select([reader], [], [], DEADLINE_S)[0], f"nothing was said for {DEADLINE_S:g} s"
    return os.read(reader, 64)


def sit_in_c_code() -> None:
    """As in a collective: C code that holds no lock of Python's, and that no signal interrupts."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def test_signals_are_heard_while_the_main_thread_sits_in_c_code(pipe: Pipe) -> None:
    reader, writer = pipe

    def body() -> None:
        on_ending_signal(lambda number: (os.write(writer, number.name.encode()), None)[1], echo_s=0.0)
        os.write(writer, b"ready")
        sit_in_c_code()

    with Children() as children:
        child = children.start(body)
        assert read_word(reader) == b"ready"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(child.pid, number)
            assert read_word(reader) == number.name.encode()


def test_an_echo_is_not_heard(pipe: Pipe) -> None:
    reader, writer = pipe

    def body() -> None:
        on_ending_signal(lambda number: (os.write(writer, number.name.encode()), None)[1], echo_s=DEADLINE_S)
        signal.signal(signal.SIGUSR1, lambda *_: os.write(writer, b"after it"))
        os.write(writer, b"ready")
        while True:  # pause() would miss a signal that the kernel has given to the other thread
            time.sleep(0.05)

    with Children() as children:
        child = children.start(body)
        assert read_word(reader) == b"ready"
        os.kill(child.pid, signal.SIGTERM)
        assert read_word(reader) == b"SIGTERM"
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGUSR1)
        assert read_word(reader) == b"after it"
        assert not select.select([reader], [], [], 0.2)[0], "the second SIGTERM is the echo of the first"


def test_in_a_forked_child_the_signals_end_it_again(pipe: Pipe) -> None:
    reader, writer = pipe

    def forget_and_wait() -> None:
        forget_ending_signals()
        os.write(writer, b"ready")
        while True:
            signal.pause()

    def body() -> None:
        on_ending_signal(lambda number: None)
        with Children() as children:
            child = children.start(forget_and_wait)
            assert read_word(reader) == b"ready"
            os.kill(child.pid, signal.SIGTERM)
            child.wait_killed()

    with Children() as children:
        children.start(body).result()
