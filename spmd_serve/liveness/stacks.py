"""Requests for stack traces: signal a node's processes one after the other to write them."""

import os
import threading
import time
from collections.abc import Sequence

from spmd_serve.liveness.protocol import STACKS_SIGNAL
from spmd_serve.system.process import send_signal

GAP_S = 0.1
"""Time for one process to write its stacks. Processes that share a log would mix their lines otherwise."""
ALL_S = 1.5
"""Most time for all processes of a node: the root cause of a hang is declared without waiting any longer."""


def ask_in_turn(pidfds: Sequence[int]) -> None:
    """Send the signal to each of these processes from a thread; return at once."""
    own = [os.dup(pidfd) for pidfd in pidfds]  # the caller may close its own meanwhile
    threading.Thread(target=_ask, args=(own,), name="stacks", daemon=True).start()


def _ask(pidfds: Sequence[int]) -> None:
    gap = min(GAP_S, ALL_S / len(pidfds))
    for pidfd in pidfds:
        send_signal(pidfd, STACKS_SIGNAL)
        os.close(pidfd)
        time.sleep(gap)
