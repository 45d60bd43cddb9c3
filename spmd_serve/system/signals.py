"""Signals that are heard while the main thread sits in C code (a collective, a model load)."""

import os
import signal
import threading
import time
from collections.abc import Callable

ENDING = (signal.SIGTERM, signal.SIGINT)
ECHO_S = 1.0
"""Who signals a whole control group (systemd does) reaches a rank twice: at once, and through torchrun."""


class Echo:
    """Tells a signal from the echo of the one before, which comes within `within_s` seconds of it."""

    def __init__(self, within_s: float = ECHO_S) -> None:
        self._within_s = within_s
        self._heard = -within_s

    def heard(self) -> bool:
        """A signal has come: whether it is an echo."""
        now = time.monotonic()
        if now - self._heard < self._within_s:
            return True
        self._heard = now
        return False


def on_ending_signal(callback: Callable[[signal.Signals], None], echo_s: float = ECHO_S) -> None:
    """Call `callback(number)` from a thread for every SIGTERM and SIGINT. Call from the main thread.

    One that comes within `echo_s` seconds of the one before is its echo, and not heard.

    Python runs its handlers only between two bytecodes of the main thread; the C-level handler writes the
    number into a pipe at once (`signal.set_wakeup_fd`), and a thread reads it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in ENDING:
        signal.signal(number, lambda *_: None)
    threading.Thread(
        target=_listen, args=(reader, callback, Echo(echo_s)), name="signals", daemon=True
    ).start()


def forget_ending_signals() -> None:
    """In a forked child: the default action again."""
    signal.set_wakeup_fd(-1)
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


def ignore_ending_signals() -> None:
    """From the main thread: what is left to do takes no time that is worth a signal."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _listen(reader: int, callback: Callable[[signal.Signals], None], echo: Echo) -> None:
    while True:
        for number in os.read(reader, 64):
            if number in ENDING and not echo.heard():
                callback(signal.Signals(number))
