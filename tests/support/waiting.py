"""Waiting for something to become true: always with a deadline, always saying for what."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.05

Note = Callable[[str], None]
"""Prints what a test has seen, past pytest's capture."""


class DeadlineError(AssertionError):
    """What was waited for did not happen in time."""


def wait_until(condition: Callable[[], T | None], deadline_s: float, what: str) -> T:
    """Asks again and again and returns the first true answer; DeadlineError after `deadline_s` seconds."""
    end = time.monotonic() + deadline_s
    while True:
        if answer := condition():
            return answer
        if time.monotonic() >= end:
            raise DeadlineError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(POLL_S)
