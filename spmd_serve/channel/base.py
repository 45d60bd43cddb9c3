"""What every part of the control channel shares: its interfaces, its terms, its errors and its clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.wire.frames import DEFAULT_MAX_BYTES, VERSION, Buffer, Kind

# Waits are cut into slices, so that signal handlers run and shutdown() is seen. A slice costs about 0.35 ms
# of CPU in gloo (it builds a C++ stack trace): four a second are 0.15 % of a core.
SLICE_S = 0.25

Say = Callable[[str], None]


class ChannelClosed(SpmdError):
    """This side's shutdown() was called: nothing more is sent or received."""


class ChannelStopped(ChannelClosed):
    """The other side ended the channel in order."""


class PeerSilent(PeerLost, TimeoutError):
    """Somebody did not take a message in time; names who it may be. Nothing of that message was sent."""


class Outbox(Protocol):
    """The driver's side: what vLLM's executor calls on its message queue."""

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send `obj` to every rank; `timeout` in seconds, None for the channel's own limit."""

    def wait_until_ready(self) -> None:
        """Return when every rank is connected."""

    def shutdown(self) -> None:
        """End the channel; from any thread, more than once."""


class Inbox(Protocol):
    """A rank's side, and the driver's side of a rank's answers."""

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> object:
        """The next object. TimeoutError after `timeout` seconds; None waits for ever, `indefinite` too."""

    def wait_until_ready(self) -> None:
        """Return when the other side is connected."""

    def shutdown(self) -> None:
        """Wake a waiting dequeue with ChannelClosed; from any thread or a signal handler, more than once."""


class Ring(Protocol):
    """Where a relay puts what it received: vLLM's MessageQueue inside a host, a queue inside a process."""

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Add `obj`, waiting while the ring is full."""


class RingReader(Protocol):
    """A rank's end of a ring."""

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object; TimeoutError after `timeout` seconds."""


class Slot(Protocol):
    """Memory that one broadcast reads from or writes to."""

    memory: bytearray
    view: memoryview


class Transport(Protocol):
    """One process group with its device: broadcasts from member 0 to all others, in order."""

    def slot(self, memory: bytearray) -> Any:
        """A Slot over `memory`, which must not be resized afterwards."""

    def start(self, slot: Any) -> None:
        """Begin the broadcast of `slot`, as sender or receiver; returns at once."""

    def done(self, slot: Any) -> bool:
        """Whether it is complete. PeerLost when it failed."""

    def wait(self, slot: Any, seconds: float) -> bool:
        """Sleep until it is complete, at most `seconds`: whether it is. PeerLost when it failed."""

    def close(self, started: list[Any]) -> None:
        """Let go of the group; `started` are all slots whose broadcast may still be under way."""


class Doorbell(Protocol):
    """Tells a member that a frame is coming, where none is posted ahead."""

    def doorbell(self, timeout: float) -> Kind | None:
        """MESSAGE, HEARTBEAT or STOP; None after `timeout` seconds. PeerLost when the driver is gone."""


@dataclass(frozen=True)
class ChannelSpec:
    """The terms that all members of one channel share."""

    name: str  # unique in the store
    members: tuple[str, ...]  # who they are, for errors: the driver first, then one per host or rank
    round_id: str  # the run's generation
    key: bytes | None = field(default=None, repr=False)  # signs all frames
    depth: int = 4  # receives posted ahead, and frames that a sender may have under way
    frame_bytes: int = 16 * 1024
    max_bytes: int = DEFAULT_MAX_BYTES  # longest message

    def __post_init__(self) -> None:
        if self.depth < 1 or self.frame_bytes < 256 or self.max_bytes < 1 or len(self.members) < 2:
            raise ValueError(f"no such channel: {self}")

    def terms(self) -> str:
        """What must be the same on every member, as text."""
        return (
            f"protocol {VERSION}, {len(self.members)} members, frames of {self.frame_bytes} bytes,"
            f" {self.depth} ahead, messages up to {self.max_bytes} bytes,"
            f" {'signed' if self.key else 'not signed'}"
        )


class Deadline:
    """A point in time, `seconds` from now; None never comes."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    def left(self, most: float = SLICE_S) -> float:
        """Seconds to wait next: what is left, between 0 and `most`."""
        return most if self._at is None else min(most, max(0.0, self._at - time.monotonic()))

    def over(self) -> bool:
        """Whether it has passed."""
        return self._at is not None and time.monotonic() >= self._at


def join(parts: list[Buffer] | tuple[Buffer, ...]) -> bytearray:
    """The parts in one new piece of memory."""
    return bytearray().join(parts)
