"""`--control-backend nccl`: the driver's messages over the ranks' own device network. Not yet run on GPUs.

The driver has no GPU, so it hands each message to rank 0 through a local ring, and rank 0's RootRelay
broadcasts it to all other ranks on a stream of its own. A posted NCCL receive spins on the GPU, so nothing is
posted ahead: the driver rings a bell (one byte, backwards over each rank's reply connection), and a member
posts one receive per ring. Heartbeats and the end are rings too, so that an idle GPU stays idle. Numbers,
signatures and frames are those of group_broadcast.py; only the lane differs, and the tests run this path with
gloo lanes. Rank 0 here is the replica's first rank, which must be on its driver's host.

Beware: the broadcast occupies the sender's GPU until every member has posted. Let members receive in a Relay
thread (into a LocalRing), so that posting waits for no model step.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from spmd_serve.channel.base import POLL_INTERVAL_S, ChannelClosed, ChannelSpec, Ring, RingReader
from spmd_serve.channel.broadcast import BroadcastOutbox
from spmd_serve.channel.relay import END
from spmd_serve.channel.reply import ReplyInbox
from spmd_serve.errors import PeerLost, SpmdError
from spmd_serve.wire import codec
from spmd_serve.wire.frames import Buffer, Kind

_POLL_S = 50e-6  # between bell and arrival; short, and not on the GPU


class CudaSlot:
    """Host memory, its copy on the device, and the broadcast under way on it."""

    def __init__(self, memory: bytearray, device: torch.device) -> None:
        self.memory = memory
        self.view = memoryview(memory)
        self.host = torch.frombuffer(memory, dtype=torch.uint8)
        self.on_device = torch.empty(len(memory), dtype=torch.uint8, device=device)
        self.work: Any = None
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]


class NcclTransport:
    """One NCCL group that broadcasts from member 0, on a stream of its own."""

    def __init__(self, group: Any, device: torch.device, peers: str) -> None:
        self._group, self._device, self._peers = group, device, peers
        self._root = group.rank() == 0
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def slot(self, memory: bytearray) -> CudaSlot:
        """A slot over `memory`."""
        with torch.cuda.stream(self._stream):  # its device memory belongs to that stream
            return CudaSlot(memory, self._device)

    def start(self, slot: CudaSlot) -> None:
        """Begin the broadcast of `slot`: copy in, broadcast, copy out, all in the stream's order."""
        try:
            with torch.cuda.stream(self._stream):
                if self._root:
                    slot.on_device.copy_(slot.host)
                slot.work = self._group.broadcast(slot.on_device, 0)
                slot.work.wait()  # the stream waits, not this thread
                slot.event.record(self._stream)
        except RuntimeError as error:
            raise self._lost(error) from error

    def done(self, slot: CudaSlot) -> bool:
        """Whether the broadcast is complete and, at a receiver, in host memory."""
        try:
            if not slot.event.query():  # type: ignore[no-untyped-call]
                return False
            if not self._root:
                with torch.cuda.stream(self._stream):
                    slot.host.copy_(slot.on_device)
        except RuntimeError as error:
            raise self._lost(error) from error
        return True

    def wait(self, slot: CudaSlot, seconds: float) -> bool:
        """Sleep until complete, at most `seconds`. Not event.synchronize(): nothing could end that wait."""
        deadline = time.monotonic() + seconds
        while not self.done(slot):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self, started: list[CudaSlot]) -> None:
        """Abort the group: NCCL, unlike gloo, can end what is under way."""
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _lost(self, error: RuntimeError) -> PeerLost:
        return PeerLost(f"lost {self._peers}: {str(error).partition(chr(10))[0]}")


def nccl_transport(store: Store, spec: ChannelSpec, member: int, device: torch.device) -> NcclTransport:
    """The lane of `member` (= rank) on its `device`; one lane serves for frames and bodies."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=36500)
    options.config.max_ctas = 1  # messages are small: leave the GPU to the model
    group = ProcessGroupNCCL(PrefixStore(f"{spec.name}/nccl", store), member, len(spec.members), options)
    group.eager_connect_single_device(device)
    return NcclTransport(group, device, ", ".join(spec.members))


class DoorbellOutbox:
    """The driver's end: each message into rank 0's ring, then a ring of every other rank's bell."""

    def __init__(self, ring: Ring, doorbells: Sequence[ReplyInbox]) -> None:
        self._ring, self._doorbells = ring, doorbells
        self._lock = threading.Lock()  # a ring per message, in the order of the messages
        self._closed = False

    def wait_until_ready(self) -> None:
        """The ring's and the connections' own business."""

    def enqueue(self, obj: object, timeout: float | None = None) -> int:
        """Send `obj` to all ranks; waits while rank 0's ring is full. Returns its bytes, counted once."""
        payload = codec.encode(obj)
        self.enqueue_encoded(payload, timeout)
        return len(payload)

    def enqueue_encoded(self, payload: Buffer, timeout: float | None = None) -> None:
        """Send what codec.encode has made already."""
        with self._lock:
            if self._closed:
                raise ChannelClosed("the control channel is closed")
            self._ring.enqueue(payload, timeout=timeout)
            self._ring_all(Kind.MESSAGE)

    def heartbeat(self) -> bool:
        """A sign of life for all but rank 0, which is on this host; never waits."""
        if self._closed or not self._lock.acquire(blocking=False):
            return False
        try:
            self._ring_all(Kind.HEARTBEAT)
        finally:
            self._lock.release()
        return True

    def shutdown(self) -> None:
        """Tell all ranks that this was all."""
        if self._closed:
            return
        self._closed = True
        with suppress(SpmdError, TimeoutError):
            self._ring.enqueue(END, timeout=1.0)
        with suppress(SpmdError):
            self._ring_all(Kind.STOP)

    def _ring_all(self, kind: Kind) -> None:
        for doorbell in self._doorbells:
            doorbell.ring(kind)


class RootRelay:
    """Rank 0's thread: from the driver's ring to all other ranks, and to rank 0's own loop."""

    def __init__(
        self, ring: RingReader, outbox: BroadcastOutbox, mine: Ring, on_error: Callable[[BaseException], None]
    ) -> None:
        self._ring, self._outbox, self._mine, self._on_error = ring, outbox, mine, on_error
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spmd-root-relay", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the driver's end; whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def shutdown(self) -> None:
        """Stop relaying. Signal-safe."""
        self._closing = True

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    payload = self._ring.dequeue(timeout=POLL_INTERVAL_S, indefinite=True)
                except TimeoutError:
                    continue
                if len(payload):
                    self._outbox.enqueue_encoded(payload)
                self._mine.enqueue(payload)
                if not len(payload):
                    self._outbox.shutdown()
                    return
        except ChannelClosed:
            pass
        except BaseException as error:
            self._on_error(error)
