"""Interfaces, message types, errors and deadlines that all parts of the control channel share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.wire.frames import DEFAULT_MAX_BYTES, VERSION, Buffer, Kind

# Waits are split into intervals, so that signal handlers run and shutdown() is noticed. One interval costs
# about 0.35 ms of CPU in gloo (it builds a C++ stack trace): four a second are 0.15 % of a core.
POLL_INTERVAL_S = 0.25

Say = Callable[[str], None]


class ChannelClosed(SpmdError):
    """shutdown() was called on this end: nothing more is sent or received."""


class ChannelStopped(ChannelClosed):
    """The other end closed the channel in order."""


class PeerSilent(PeerLost, TimeoutError):
    """A member did not take a message in time. The error names the candidates; nothing was sent."""


class WorkerCall(NamedTuple):
    """A control message that calls a method of every worker: what vLLM's `collective_rpc` enqueues.

    vLLM enqueues a plain tuple with these fields, and a rank reads a WorkerCall. The only other control
    messages are `Kind.HEARTBEAT` and `Kind.STOP`, which travel as their number.
    """

    method: str | bytes
    """Name of a worker method, or a pickled callable (VLLM_ALLOW_INSECURE_SERIALIZATION)."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_rank: int | None
    """The rank in the replica that replies; None for a reply from every rank."""


class Outbox(Protocol):
    """The sending end, as vLLM's executor and worker use a message queue."""

    def enqueue(self, obj: object, timeout: float | None = None) -> int | None:
        """Send `obj` to every reader, and return the size of its encoding in bytes if it is known.

        `timeout` is in seconds; None stands for the limit of the implementation. Raises TimeoutError.
        """

    def wait_until_ready(self) -> None:
        """Return when every reader is connected."""

    def shutdown(self) -> None:
        """Close the channel. May be called from any thread, and more than once."""


class Inbox(Protocol):
    """The receiving end, as vLLM's executor and worker use a message queue."""

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> object:
        """Return the next object.

        Raises TimeoutError after `timeout` seconds. With None, or with `indefinite`, there is no limit.
        """

    def wait_until_ready(self) -> None:
        """Return when the sender is connected."""

    def shutdown(self) -> None:
        """Wake a waiting dequeue with ChannelClosed. Signal-safe; may be called more than once."""


class Ring(Protocol):
    """The end that a relay writes to: vLLM's MessageQueue inside a node, a queue inside a process."""

    def enqueue(self, obj: Any, timeout: float | None = None) -> object:
        """Add `obj`; wait while the ring is full, and raise TimeoutError after `timeout` seconds."""


class RingReader(Protocol):
    """The end of a ring that a rank reads."""

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next object. Raises TimeoutError after `timeout` seconds."""


class Slot(Protocol):
    """Memory that one broadcast reads from or writes to."""

    memory: bytearray
    view: memoryview


class Transport(Protocol):
    """One process group with its device: ordered broadcasts from member 0 to all others."""

    def slot(self, memory: bytearray) -> Any:
        """Return a Slot over `memory`, which must not be resized afterwards."""

    def start(self, slot: Any) -> None:
        """Begin the broadcast of `slot`, as sender or receiver, and return at once."""

    def done(self, slot: Any) -> bool:
        """Return whether the broadcast is complete. Raises PeerLost when it failed."""

    def wait(self, slot: Any, seconds: float) -> bool:
        """Sleep at most `seconds` until the broadcast is complete; return whether it is. Raises PeerLost."""

    def close(self, started: list[Any]) -> None:
        """Release the group; `started` are all slots whose broadcast may not be complete."""


class Doorbell(Protocol):
    """Announces a frame to a member that posts no receives ahead."""

    def doorbell(self, timeout: float) -> Kind | None:
        """Return MESSAGE, HEARTBEAT or STOP, or None after `timeout` seconds. Raises PeerLost."""


@dataclass(frozen=True)
class ChannelSpec:
    """The terms that all members of one channel share."""

    name: str  # unique in the store
    members: tuple[str, ...]  # their names in errors: the driver first, then one per node or rank
    round_id: str
    key: bytes | None = field(default=None, repr=False)  # signs all frames
    depth: int = 4  # receives posted ahead, and frames that a sender may have in flight
    frame_bytes: int = 16 * 1024
    max_bytes: int = DEFAULT_MAX_BYTES  # longest message

    def __post_init__(self) -> None:
        if self.depth < 1 or self.frame_bytes < 256 or self.max_bytes < 1 or len(self.members) < 2:
            raise ValueError(f"no such channel: {self}")

    def terms(self) -> str:
        """Return what must be the same on every member, as text."""
        return (
            f"protocol {VERSION}, {len(self.members)} members, frames of {self.frame_bytes} bytes,"
            f" {self.depth} ahead, messages up to {self.max_bytes} bytes,"
            f" {'signed' if self.key else 'not signed'}"
        )


class Deadline:
    """A point in time `seconds` from now, or never with None."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    def left(self, most: float = POLL_INTERVAL_S) -> float:
        """Return the seconds to wait next: the time left, between 0 and `most`."""
        return most if self._at is None else min(most, max(0.0, self._at - time.monotonic()))

    def over(self) -> bool:
        """Return whether the deadline has passed."""
        return self._at is not None and time.monotonic() >= self._at


def join(parts: list[Buffer] | tuple[Buffer, ...]) -> bytearray:
    """Return a copy of all parts in one piece of memory."""
    return bytearray().join(parts)
