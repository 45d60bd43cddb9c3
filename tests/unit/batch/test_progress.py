"""BatchProgress: counts, rates, the time left, and how it is shown."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Iterator

import pytest

from spmd_serve.batch.progress import BarDisplay, BatchProgress, LogDisplay, display_for
from spmd_serve.batch.request_lines import RequestOutcome


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_line_and_summary() -> None:
    clock = Clock()
    progress = BatchProgress(total=1000, restored=500, failed=2, clock=clock)
    for index in range(100):
        progress.note(RequestOutcome(index == 0, 10, 20))
    clock.now += 10
    assert progress.line() == (
        "600/1,000 lines (60 %), 3 failed, 10.0 lines/s, 100 tokens/s in, 200 out, 40.0 s left"
    )
    assert progress.summary() == (
        "600 lines (500 by earlier runs): 597 answered, 3 failed; "
        "10.0 s, 1,000 tokens in (100/s), 2,000 out (200/s)"
    )


def test_rates_are_those_of_the_last_minute() -> None:
    clock = Clock()
    progress = BatchProgress(total=None, clock=clock)
    for _ in range(20):
        clock.now += 10
        progress.note(RequestOutcome(False, 1, 1))
        progress.rates()
    clock.now += 120
    assert progress.rates().lines == 0
    assert "?" in progress.line() and "left" not in progress.line()


def test_long_times_read_as_hours() -> None:
    clock = Clock()
    progress = BatchProgress(total=7300, clock=clock)
    for _ in range(100):
        progress.note(RequestOutcome(False, 0, 0))
    clock.now += 100
    assert progress.line().endswith("2:00:00 left")


@pytest.fixture
def terminal() -> Iterator[tuple[int, io.TextIOWrapper]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        yield ours, stream
    os.close(ours)


def test_bar_on_a_terminal(terminal: tuple[int, io.TextIOWrapper]) -> None:
    ours, stream = terminal
    progress = BatchProgress(total=10, restored=4)
    display = display_for(progress, print, stream)
    assert isinstance(display, BarDisplay)
    progress.note(RequestOutcome(True, 5, 5))
    display.update(progress)
    display.close(progress)
    os.set_blocking(ours, False)
    shown = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            shown += os.read(ours, 65536)
    last = shown.decode().strip().split("\r")[-1]
    assert "5/10" in last and "1 failed" in last


def test_lines_on_a_terminal_without_a_width(terminal: tuple[int, io.TextIOWrapper]) -> None:
    _, stream = terminal
    fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    assert isinstance(display_for(BatchProgress(total=10), print, stream), LogDisplay)


def test_lines_without_a_terminal() -> None:
    said: list[str] = []
    progress = BatchProgress(total=10)
    display = display_for(progress, said.append, io.StringIO())
    assert isinstance(display, LogDisplay) and display.interval_s == 10
    display.update(progress)
    display.close(progress)
    assert len(said) == 1 and said[0].startswith("0/10 lines (0 %)")
