"""Control channels for tests, in their three shapes; the ends are opened in forked processes."""

import os
import select
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from spmd_serve.channel.base import ChannelClosed, ChannelSpec, Inbox
from spmd_serve.channel.broadcast import BroadcastInbox, BroadcastOutbox
from spmd_serve.channel.gloo import open_inbox, open_outbox, open_transports
from spmd_serve.channel.nccl import DoorbellOutbox, RootRelay
from spmd_serve.channel.relay import LocalRing, Relay, RingInbox
from spmd_serve.channel.reply import ReplySender
from spmd_serve.channel.reply_listener import ReplyListener

DEADLINE_S = 20.0
SLOTS = 10  # of a ring, as vLLM's has


class PipeRing:
    """A ring between processes that were forked after it was made: one bounded pipe per reader."""

    def __init__(self, readers: int) -> None:
        self._data = [os.pipe() for _ in range(readers)]
        self._free = [os.pipe() for _ in range(readers)]
        for _, write in self._free:
            os.write(write, bytes(SLOTS))

    def enqueue(self, obj: bytes | bytearray, timeout: float | None = None) -> None:
        for read, _ in self._free:
            if not select.select([read], [], [], timeout)[0]:
                raise TimeoutError
        for (read, _), (_, write) in zip(self._free, self._data, strict=True):
            os.read(read, 1)
            whole = memoryview(struct.pack("<Q", len(obj)) + bytes(obj))
            while whole:
                whole = whole[os.write(write, whole) :]

    def reader(self, number: int) -> "PipeReader":
        return PipeReader(self._data[number][0], self._free[number][1])

    def close(self) -> None:
        for pair in (*self._data, *self._free):
            for fd in pair:
                os.close(fd)


class PipeReader:
    def __init__(self, data: int, free: int) -> None:
        self._data, self._free = data, free

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> bytes:
        if not select.select([self._data], [], [], timeout)[0]:
            raise TimeoutError
        (length,) = struct.unpack("<Q", self._read(8))
        whole = self._read(length)
        os.write(self._free, b"\0")
        return whole

    def _read(self, length: int) -> bytes:
        whole = b""
        while len(whole) < length:
            whole += os.read(self._data, length - len(whole))
        return whole


class RelayedInbox:
    """A rank's ring, with the error of the relay that feeds it: in production that ends the process."""

    def __init__(self, reader: Any) -> None:
        self._inbox = RingInbox(reader)
        self._error: BaseException | None = None
        self.relay: Any = None

    def failed(self, error: BaseException) -> None:
        self._error = error
        self._inbox.shutdown()

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> object:
        try:
            return self._inbox.dequeue(timeout, indefinite)
        except ChannelClosed:
            if self._error is not None:
                raise self._error from None
            raise

    def wait_until_ready(self) -> None:
        self._inbox.wait_until_ready()

    def shutdown(self) -> None:
        self._inbox.shutdown()
        if self.relay is not None:
            self.relay.shutdown()


Tamper = Callable[[BroadcastOutbox], None]


class Rig:
    """One channel. `hears`: the ranks that are told of errors and heartbeats themselves."""

    ranks: tuple[int, ...]
    hears: tuple[int, ...]
    members: tuple[str, ...]

    def __init__(
        self, port: int, name: str = "control", *, tamper: Tamper = lambda outbox: None, **terms: Any
    ) -> None:
        self._port, self._tamper = port, tamper
        self.spec = ChannelSpec(name, self.members, "run1", **terms)
        self.join_timeout_s = DEADLINE_S

    def store(self) -> Store:
        timeout = timedelta(seconds=DEADLINE_S)
        return PrefixStore("run1", TCPStore("127.0.0.1", self._port, is_master=False, timeout=timeout))

    def outbox(self) -> Any:
        raise NotImplementedError

    def inbox(self, rank: int, on_heartbeat: Callable[[], None] | None = None) -> Inbox:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _member(self, member: int, on_heartbeat: Callable[[], None] | None) -> BroadcastInbox:
        return open_inbox(
            self.store(),
            self.spec,
            member,
            interface="lo",
            on_heartbeat=on_heartbeat,
            join_timeout_s=self.join_timeout_s,
        )


class GlooRig(Rig):
    """Every rank is a member."""

    ranks: tuple[int, ...] = (0, 1)
    hears: tuple[int, ...] = (0, 1)
    members: tuple[str, ...] = ("the driver", "rank 0 on host a", "rank 1 on host b")

    def outbox(self) -> Any:
        outbox = open_outbox(self.store(), self.spec, address="127.0.0.1", join_timeout_s=self.join_timeout_s)
        self._tamper(outbox)
        return outbox

    def inbox(self, rank: int, on_heartbeat: Callable[[], None] | None = None) -> Inbox:
        return self._member(rank + 1, on_heartbeat)


class RelayRig(GlooRig):
    """Ranks 0 and 1 are on one host, whose leader 0 relays into their ring; rank 2 is alone on its host."""

    ranks = (0, 1, 2)
    hears = (0, 2)
    members = ("the driver", "host a (ranks 0-1)", "host b (rank 2)")

    def __init__(self, port: int, name: str = "control", **more: Any) -> None:
        super().__init__(port, name, **more)
        self._ring = PipeRing(2)

    def inbox(self, rank: int, on_heartbeat: Callable[[], None] | None = None) -> Inbox:
        if rank == 2:
            return self._member(2, on_heartbeat)
        inbox = RelayedInbox(self._ring.reader(rank))
        if rank == 0:
            inbox.relay = Relay(self._member(1, on_heartbeat), self._ring, inbox.failed)
        return inbox

    def close(self) -> None:
        self._ring.close()


class NcclRig(Rig):
    """The way of --control-backend nccl, with gloo lanes: rank 0 broadcasts, a bell makes the others post."""

    ranks = (0, 1, 2)
    hears = (1, 2)
    members = ("rank 0 on host a", "rank 1 on host a", "rank 2 on host b")

    def __init__(self, port: int, name: str = "control", **more: Any) -> None:
        super().__init__(port, name, **more)
        self._ring = PipeRing(1)

    def outbox(self) -> Any:
        listener = ReplyListener("127.0.0.1", self.spec.round_id, key=self.spec.key)
        self.store().set(f"{self.spec.name}/reply", str(listener.port))
        inside = listener.accept({1: self.members[1], 2: self.members[2]}, DEADLINE_S, print)
        return DoorbellOutbox(self._ring, [inside[1], inside[2]])

    def inbox(self, rank: int, on_heartbeat: Callable[[], None] | None = None) -> Inbox:
        store = self.store()
        if rank == 0:
            frames, bodies = open_transports(store, self.spec, 0, "lo", "", self.join_timeout_s, print)
            outbox = BroadcastOutbox(frames, bodies, self.spec, drain=False)
            self._tamper(outbox)
            mine = LocalRing()
            inbox = RelayedInbox(mine)
            inbox.relay = RootRelay(self._ring.reader(0), outbox, mine, inbox.failed)
            return inbox
        port = int(store.get(f"{self.spec.name}/reply"))
        doorbell = ReplySender("127.0.0.1", port, rank, self.spec.round_id, key=self.spec.key)
        frames, bodies = open_transports(store, self.spec, rank, "lo", "", self.join_timeout_s, print)
        direct = BroadcastInbox(frames, bodies, self.spec, doorbell=doorbell, on_heartbeat=on_heartbeat)
        if rank == 1:
            return direct
        ring = LocalRing()
        relayed = RelayedInbox(ring)
        relayed.relay = Relay(direct, ring, relayed.failed)
        return relayed

    def close(self) -> None:
        self._ring.close()


RIGS: dict[str, type[Rig]] = {"gloo": GlooRig, "relay": RelayRig, "nccl": NcclRig}


def sizes(count: int) -> Iterator[int]:
    """Of messages: mostly small, some around a frame's size, a few of megabytes."""
    around = (1, 100, 16_300, 16_384, 16_385, 40_000)
    for number in range(count):
        yield 3 << 20 if number % 50 == 49 else around[number % len(around)]


def content(number: int, size: int) -> bytes:
    """Of message `number`."""
    return bytes([number % 251]) * size


def digest(parts: Sequence[bytes]) -> list[int]:
    """Something short that tells the parts and their order."""
    return [zlib.crc32(part) for part in parts]
