"""The control channel's own gloo groups: no default group is made or touched.

Facts of gloo that shape this file: a group that is destroyed while a receive is posted waits for it for
ever, also at the end of the process, and abort() does nothing; so a group is given up only when nothing is
under way, and else lives until the process has ended. Creating a group connects all members; one that never
comes would block inside C++, so members first meet in the store, where the wait can name who is missing.
"""

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from spmd_serve.channel.base import ChannelSpec, Say
from spmd_serve.channel.broadcast import SEND_TIMEOUT_S, BroadcastInbox, BroadcastOutbox
from spmd_serve.errors import PeerLost, UsageError
from spmd_serve.rendezvous.store import wait_keys

FOREVER = timedelta(
    days=36500
)  # gloo takes neither 0 nor timedelta.max for "no timeout"; liveness has its own beat


class GlooSlot:
    """Memory shared with a tensor, and the broadcast that is under way on it."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.view = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.work: Any = None


class GlooTransport:
    """One gloo group that broadcasts from member 0. `peers` says in errors who may be lost."""

    def __init__(self, group: Any, peers: str) -> None:
        self._group = group
        self._peers = peers
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # see above: never destroyed by accident

    def slot(self, memory: bytearray) -> GlooSlot:
        """A slot over `memory`."""
        return GlooSlot(memory)

    def start(self, slot: GlooSlot) -> None:
        """Begin the broadcast of `slot`."""
        try:
            slot.work = self._group.broadcast(slot.tensor, 0)
        except RuntimeError as error:
            raise self._lost(error) from error

    def done(self, slot: GlooSlot) -> bool:
        """Whether the broadcast is complete; PeerLost when it failed."""
        if not slot.work.is_completed():
            return False
        try:
            slot.work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return True

    def wait(self, slot: GlooSlot, seconds: float) -> bool:
        """Sleep until complete, at most `seconds`: whether it is; PeerLost when it failed."""
        try:
            slot.work.wait(timedelta(seconds=max(seconds, 0.001)))  # 0 would be "for ever"
            return True
        except RuntimeError:  # a timeout, which leaves the operation alive, or its failure
            return self.done(slot)

    def close(self, started: list[GlooSlot]) -> None:
        """Destroy the group if nothing is under way on it."""
        if self._group is not None and all(slot.work.is_completed() for slot in started):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
        self._group = None

    def _lost(self, error: RuntimeError) -> PeerLost:
        # "[/pytorch/…/pair.cc:537] Connection closed by peer [10.0.0.2]:4711. This is typically caused by …"
        text = str(error).partition("\n")[0].partition(". This is typically")[0]
        if text.startswith("["):
            text = text.partition("] ")[2]
        return PeerLost(f"lost {self._peers}: {text}")


def open_outbox(
    store: Store,
    spec: ChannelSpec,
    *,
    interface: str = "",
    address: str = "",
    join_timeout_s: float = 300.0,
    send_timeout_s: float = SEND_TIMEOUT_S,
    say: Say = print,
) -> BroadcastOutbox:
    """The driver's end (member 0), over the network device of that interface or local address.

    Returns when all members have joined; PeerLost names those that have not after `join_timeout_s`.
    """
    frames, bodies = open_transports(store, spec, 0, interface, address, join_timeout_s, say)
    return BroadcastOutbox(frames, bodies, spec, timeout_s=send_timeout_s)


def open_inbox(
    store: Store,
    spec: ChannelSpec,
    member: int,
    *,
    interface: str = "",
    address: str = "",
    join_timeout_s: float = 300.0,
    on_heartbeat: Callable[[], None] | None = None,
    spin_s: float = 0.0,
    say: Say = print,
) -> BroadcastInbox:
    """The end of member 1 or above; see open_outbox and BroadcastInbox."""
    frames, bodies = open_transports(store, spec, member, interface, address, join_timeout_s, say)
    return BroadcastInbox(frames, bodies, spec, on_heartbeat=on_heartbeat, spin_s=spin_s)


def open_transports(
    store: Store, spec: ChannelSpec, member: int, interface: str, address: str, timeout_s: float, say: Say
) -> tuple[GlooTransport, GlooTransport]:
    """Meet the other members, and make the lanes of `member` for frames and for bodies."""
    if bool(interface) == bool(address):
        raise ValueError("give either the interface or the address that gloo shall use")
    try:
        # One device for both: each costs a thread that wakes 100 times a second, 0.25 % of a core.
        device = (
            ProcessGroupGloo.create_device(interface=interface)
            if interface
            else ProcessGroupGloo.create_device(hostname=address)
        )
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise UsageError(f"gloo cannot use {interface or address} for {spec.name}: {cause}") from error
    meet(store, spec, member, timeout_s, say)
    # A gloo thread serves one operation at a time: one for each receive posted ahead, or frame under way.
    frames = _transport(store, spec, "frames", member, device, spec.depth, timeout_s)
    return frames, _transport(store, spec, "bodies", member, device, 2, timeout_s)


def _transport(
    store: Store, spec: ChannelSpec, part: str, member: int, device: Any, threads: int, timeout_s: float
) -> GlooTransport:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = threads
    options._timeout = timedelta(seconds=timeout_s)  # for connecting
    options._devices = [device]
    peers = ", ".join(spec.members[1:]) if member == 0 else f"{spec.members[0]} (or a host between)"
    try:
        group = ProcessGroupGloo(
            PrefixStore(f"{spec.name}/{part}", store), member, len(spec.members), options
        )
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise PeerLost(
            f"{spec.name}: {spec.members[member]} cannot connect to all members: {cause}"
        ) from error
    group.set_timeout(FOREVER)
    return GlooTransport(group, peers)


def meet(store: Store, spec: ChannelSpec, member: int, timeout_s: float, say: Say) -> None:
    """Wait until all members are at the door and agree on the channel's terms.

    Says after 3 s, then every 10 s, who is missing. PeerLost names them after `timeout_s`, UsageError the
    member that has other terms.
    """
    door = PrefixStore(f"{spec.name}/door", store)
    door.set(str(member), spec.terms())
    everybody = {str(number): who for number, who in enumerate(spec.members)}
    wait_keys(door, everybody, time.monotonic() + timeout_s, say, what=f"the joining of {spec.name}")
    for number, who in everybody.items():
        theirs = door.get(number).decode(errors="replace")
        if theirs != spec.terms():
            mine = f"{spec.members[member]} has {spec.terms()}"
            raise UsageError(f"{spec.name}: {who} has {theirs}, but {mine}")
