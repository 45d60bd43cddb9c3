"""The board: shared memory where members note their steps, and the watcher looks without asking anybody."""

import fcntl
import mmap
import os
import time
from typing import Literal, NamedTuple, get_args

StateName = Literal["starting", "loading", "ready", "stepping", "draining"]
STATES: tuple[StateName, ...] = get_args(StateName)
_CODES = {name: code for code, name in enumerate(STATES)}

SLOT_BYTES = 128
SLOTS = 256
BOARD_BYTES = SLOT_BYTES * SLOTS

# Fields of a slot, in words of 8 bytes. An aligned word is written and read in one piece; a slot as a whole
# is not, so the watcher never concludes anything from two fields of one single look.
_STARTED, _DONE, _STATE = 0, 1, 2
_STARTED_AT, _DONE_AT, _TURNED_AT = 3, 4, 5
_BUSY_S = 6
_SENT, _HOST_BYTES, _NETWORK_BYTES, _SEND_S = 7, 8, 9, 10
_WORKS_SINCE, _AWAITS = 11, 12
_WORDS = SLOT_BYTES // 8


class EntryReading(NamedTuple):
    """One look at a slot; times are CLOCK_MONOTONIC seconds of this host, 0.0 for never.

    busy_s: seconds in finished steps.  sent, host_bytes, network_bytes, send_s: a driver's messages, their
    bytes inside its host and over the network, and the seconds that sending them took.  works_since: when a
    driver's loop last got on with its work, 0.0 while it has none.  awaits: the rank whose reply it needs.
    """

    started: int
    done: int
    state: StateName
    started_at: float
    done_at: float
    turned_at: float
    busy_s: float = 0.0
    sent: int = 0
    host_bytes: int = 0
    network_bytes: int = 0
    send_s: float = 0.0
    works_since: float = 0.0
    awaits: int | None = None

    @property
    def last_sign(self) -> float:
        """The newest of the three times."""
        return max(self.started_at, self.done_at, self.turned_at)


class StatusTable:
    """The watcher's side: owns the memory, hands out slots."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("spmd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, BOARD_BYTES)
        # Nobody who was given the descriptor can cut the memory away under the others (SIGBUS).
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        view = memoryview(mmap.mmap(self.fd, BOARD_BYTES))
        self._integers = view.cast("Q")
        self._floats = view.cast("d")
        self._free = list(range(SLOTS - 1, -1, -1))

    def take(self) -> int | None:
        """The number of a zeroed slot; None when all are taken."""
        if not self._free:
            return None
        number = self._free.pop()
        for word in range(number * _WORDS, (number + 1) * _WORDS):
            self._integers[word] = 0
        return number

    def give_back(self, number: int) -> None:
        """The slot's owner is dead."""
        self._free.append(number)

    def read(self, number: int) -> EntryReading:
        """What the slot's owner has noted."""
        at = number * _WORDS
        code = self._integers[at + _STATE]
        return EntryReading(
            self._integers[at + _STARTED],
            self._integers[at + _DONE],
            STATES[code] if code < len(STATES) else "starting",
            self._floats[at + _STARTED_AT],
            self._floats[at + _DONE_AT],
            self._floats[at + _TURNED_AT],
            self._floats[at + _BUSY_S],
            self._integers[at + _SENT],
            self._integers[at + _HOST_BYTES],
            self._integers[at + _NETWORK_BYTES],
            self._floats[at + _SEND_S],
            self._floats[at + _WORKS_SINCE],
            awaits - 1 if (awaits := self._integers[at + _AWAITS]) else None,
        )


class StatusEntry:
    """A member's side: notes what it does. Each call is a few stores to memory: no lock, no system call."""

    def __init__(self, fd: int, number: int) -> None:
        """Map the board behind `fd` (which may be closed afterwards) and own slot `number` of it."""
        view = memoryview(mmap.mmap(fd, BOARD_BYTES))[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
        self._integers = view.cast("Q")
        self._floats = view.cast("d")

    def step_begin(self) -> None:
        """A step is in flight from now on; several may be."""
        self._floats[_STARTED_AT] = time.monotonic()
        self._integers[_STARTED] += 1

    def step_end(self) -> None:
        """The oldest step in flight is done."""
        now = time.monotonic()
        self._floats[_BUSY_S] += now - self._floats[_STARTED_AT]
        self._floats[_DONE_AT] = now
        self._integers[_DONE] += 1

    def sent(self, host_bytes: int, network_bytes: int, seconds: float) -> None:
        """A driver has sent a message to its ranks, in so many seconds."""
        self._integers[_SENT] += 1
        self._integers[_HOST_BYTES] += host_bytes
        self._integers[_NETWORK_BYTES] += network_bytes
        self._floats[_SEND_S] += seconds

    def works(self) -> None:
        """A driver's loop has something to do; called again, it has got on with it."""
        self._floats[_WORKS_SINCE] = time.monotonic()

    def waits(self) -> None:
        """A driver's loop has nothing to do until a request comes."""
        self._floats[_WORKS_SINCE] = 0.0

    def awaits(self, rank: int) -> bool:
        """A driver waits for that rank's reply until `replied`, to which the answer is to be passed."""
        works = self._floats[_WORKS_SINCE] != 0.0
        self._integers[_AWAITS] = rank + 1
        self.works()
        return works

    def replied(self, works: bool) -> None:
        """The reply has come, or is waited for no more; `works`: the loop goes on with what it did."""
        self._integers[_AWAITS] = 0
        if works:
            self.works()
        else:
            self.waits()

    def turn(self) -> None:
        """The loop has turned: a message or a heartbeat has come."""
        self._floats[_TURNED_AT] = time.monotonic()

    def state(self, name: StateName) -> None:
        """What this member does from now on. Only "ready" promises a turn with each heartbeat."""
        self.turn()
        self._integers[_STATE] = _CODES[name]

    def detach(self) -> None:
        """In a forked child: what is noted from now on goes nowhere; the slot is the parent's."""
        scratch = memoryview(bytearray(SLOT_BYTES))
        self._integers = scratch.cast("Q")
        self._floats = scratch.cast("d")


class NullStatusEntry:
    """The same methods, for a world without a watcher."""

    def step_begin(self) -> None:
        """Nothing."""

    def step_end(self) -> None:
        """Nothing."""

    def sent(self, host_bytes: int, network_bytes: int, seconds: float) -> None:
        """Nothing."""

    def works(self) -> None:
        """Nothing."""

    def waits(self) -> None:
        """Nothing."""

    def awaits(self, rank: int) -> bool:
        """Nothing."""
        return False

    def replied(self, works: bool) -> None:
        """Nothing."""

    def turn(self) -> None:
        """Nothing."""

    def state(self, name: StateName) -> None:
        """Nothing."""

    def detach(self) -> None:
        """Nothing."""
