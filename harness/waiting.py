"""Waits for conditions: each has a deadline and an error that says what it waited for."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.05
NOTE_PROPERTY = "seen"
"""The property under which pytest's reports, also those in XML, hold the lines of a `Note`."""

Note = Callable[[str], None]
"""Keep a line of a test for pytest's summary."""


class DeadlineError(AssertionError):
    """A condition has not become true in time."""


def wait_until(condition: Callable[[], T | None], deadline_s: float, what: str) -> T:
    """Poll the condition and return its first true value; DeadlineError after `deadline_s` seconds."""
    end = time.monotonic() + deadline_s
    while True:
        if answer := condition():
            return answer
        if time.monotonic() >= end:
            raise DeadlineError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(POLL_S)
