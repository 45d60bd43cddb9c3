"""The status table: shared memory in which members record their progress and the watcher reads it."""

import fcntl
import mmap
import os
import time
from typing import Literal, NamedTuple, get_args

StateName = Literal["starting", "loading", "ready", "stepping", "draining"]
STATES: tuple[StateName, ...] = get_args(StateName)
_CODES = {name: code for code, name in enumerate(STATES)}

ENTRY_BYTES = 128
ENTRIES = 256
TABLE_BYTES = ENTRY_BYTES * ENTRIES

# Fields of an entry, in words of 8 bytes. Access to an aligned word is atomic, access to a whole entry is
# not. So the watcher must not draw conclusions from two fields of a single reading.
_STARTED, _DONE, _STATE = 0, 1, 2
_STARTED_AT, _DONE_AT, _TURNED_AT = 3, 4, 5
_BUSY_S = 6
_SENT, _HOST_BYTES, _NETWORK_BYTES, _SEND_S = 7, 8, 9, 10
_WORKS_SINCE, _AWAITS = 11, 12
_WORDS = ENTRY_BYTES // 8


class EntryReading(NamedTuple):
    """The content of an entry. Times are CLOCK_MONOTONIC seconds of this machine, and 0.0 means never.

    Attributes:
        started, done: numbers of steps.
        started_at, done_at, turned_at: times of the last start and end of a step, and of the last `turn`.
        busy_s: seconds in finished steps.
        sent: number of a driver's messages.
        host_bytes, network_bytes: their bytes within the driver's node, and over the network.
        send_s: seconds that the driver has spent sending them.
        works_since: when a driver's loop last made progress; 0.0 while it has no work.
        awaits: the rank whose reply the driver waits for.
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
        """The latest of the three times."""
        return max(self.started_at, self.done_at, self.turned_at)


class StatusTable:
    """The watcher's side: owns the memory and assigns entries."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("spmd-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, TABLE_BYTES)
        # No holder of the descriptor can shrink the memory, which would end the others by SIGBUS.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        view = memoryview(mmap.mmap(self.fd, TABLE_BYTES))
        self._integers = view.cast("Q")
        self._floats = view.cast("d")
        self._free = list(range(ENTRIES - 1, -1, -1))

    def take(self) -> int | None:
        """Assign an entry, zeroed, and return its number; None if all are assigned."""
        if not self._free:
            return None
        number = self._free.pop()
        for word in range(number * _WORDS, (number + 1) * _WORDS):
            self._integers[word] = 0
        return number

    def give_back(self, number: int) -> None:
        """Free an entry whose owner has ended."""
        self._free.append(number)

    def read(self, number: int) -> EntryReading:
        """Return what the owner of the entry has recorded."""
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
    """A member's side: records progress. A call is a few stores to memory, without locks or system calls."""

    def __init__(self, fd: int, number: int) -> None:
        """Map the table behind `fd` (which may be closed afterwards), to write entry `number` of it."""
        view = memoryview(mmap.mmap(fd, TABLE_BYTES))[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
        self._integers = view.cast("Q")
        self._floats = view.cast("d")

    def step_begin(self) -> None:
        """Record that a step has started; several may be in flight."""
        self._floats[_STARTED_AT] = time.monotonic()
        self._integers[_STARTED] += 1

    def step_end(self) -> None:
        """Record that the oldest step in flight is done."""
        now = time.monotonic()
        self._floats[_BUSY_S] += now - self._floats[_STARTED_AT]
        self._floats[_DONE_AT] = now
        self._integers[_DONE] += 1

    def sent(self, host_bytes: int, network_bytes: int, seconds: float) -> None:
        """Record that a driver has sent a message to its ranks, which took so many seconds."""
        self._integers[_SENT] += 1
        self._integers[_HOST_BYTES] += host_bytes
        self._integers[_NETWORK_BYTES] += network_bytes
        self._floats[_SEND_S] += seconds

    def works(self) -> None:
        """Record that a driver's loop has work, or, called again, that it has made progress."""
        self._floats[_WORKS_SINCE] = time.monotonic()

    def waits(self) -> None:
        """Record that a driver's loop has no work until a request comes."""
        self._floats[_WORKS_SINCE] = 0.0

    def awaits(self, rank: int) -> bool:
        """Record that the driver waits for a reply of `rank`; pass the result to `replied`."""
        works = self._floats[_WORKS_SINCE] != 0.0
        self._integers[_AWAITS] = rank + 1
        self.works()
        return works

    def replied(self, works: bool) -> None:
        """Record that the driver no longer waits. `works`: what `awaits` returned: its loop has work."""
        self._integers[_AWAITS] = 0
        if works:
            self.works()
        else:
            self.waits()

    def turn(self) -> None:
        """Record one turn of the loop: it has received a message or a heartbeat."""
        self._floats[_TURNED_AT] = time.monotonic()

    def state(self, name: StateName) -> None:
        """Record the member's state. Only in "ready" must its loop turn with each heartbeat."""
        self.turn()
        self._integers[_STATE] = _CODES[name]

    def detach(self) -> None:
        """Stop writing to the table, as a forked child must: the entry belongs to its parent."""
        scratch = memoryview(bytearray(ENTRY_BYTES))
        self._integers = scratch.cast("Q")
        self._floats = scratch.cast("d")


class NullStatusEntry(StatusEntry):
    """An entry of no table, for processes without a watcher: what it records goes nowhere."""

    def __init__(self) -> None:
        self.detach()
