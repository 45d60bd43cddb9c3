"""Asks processes to write the stacks of all their threads, one after the other."""

import os
import threading
import time
from collections.abc import Sequence

from spmd_serve.liveness.protocol import STACKS_SIGNAL
from spmd_serve.system.process import send_signal

GAP_S = 0.1
"""Time for one process to write: at once they would mix their lines where they share a log."""
ALL_S = 1.5
"""Time for all of a host's: the verdict on a hang waits for no longer."""


def ask_in_turn(pidfds: Sequence[int]) -> None:
    """Send the signal to each of these processes; returns at once."""
    own = [os.dup(pidfd) for pidfd in pidfds]  # the caller may close its own meanwhile
    threading.Thread(target=_ask, args=(own,), name="stacks", daemon=True).start()


def _ask(pidfds: Sequence[int]) -> None:
    gap = min(GAP_S, ALL_S / len(pidfds))
    for pidfd in pidfds:
        send_signal(pidfd, STACKS_SIGNAL)
        os.close(pidfd)
        time.sleep(gap)
