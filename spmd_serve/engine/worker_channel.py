"""A rank's ends of the control channel: an inbox for its driver's messages, an outbox for its replies."""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from spmd_serve.channel.base import ChannelSpec, ChannelStopped, Inbox, Outbox, WorkerCall
from spmd_serve.channel.broadcast import BroadcastInbox, BroadcastOutbox
from spmd_serve.channel.gloo import meet, open_inbox
from spmd_serve.channel.in_process import InProcessChannel
from spmd_serve.channel.nccl import NcclTransport, RootRelay, nccl_transport
from spmd_serve.channel.plan import ChannelPlan, driver_node, plan_channel
from spmd_serve.channel.relay import LocalRing, Relay, RingInbox
from spmd_serve.channel.reply import ReplySender
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.shm_ring import ShmInbox, ShmOutbox
from spmd_serve.errors import PeerLost
from spmd_serve.liveness import NullStatusEntry, StatusEntry
from spmd_serve.rendezvous.store import FOREVER_S, get_json, put_json
from spmd_serve.topology import RankInfo
from spmd_serve.wire import codec
from spmd_serve.wire.frames import Kind

logger = logging.getLogger(__name__)

RING_CHUNK_BYTES = 4 << 20
"""Slot size of rings that carry replies or relayed messages; longer ones use the ring's local socket."""


def ring_key(replica: int, leader: int | None) -> str:
    """Return the store key of a ring's address: the driver's (`leader` None), or that of a relaying rank."""
    return f"channel/{replica}/ring/{'driver' if leader is None else leader}"


def reply_key(replica: int) -> str:
    """Return the store key of the driver's (host, port) for replies from other nodes."""
    return f"channel/{replica}/reply"


def loaded_key(rank: int) -> str:
    """Return the store key that a rank sets when its shard is loaded, to its reply ring's address or null."""
    return f"channel/loaded/{rank}"


def channel_plan(spec: JobSpec, replica: int) -> ChannelPlan:
    """Return how the driver of `replica` reaches its ranks."""
    home = driver_node(spec.lb, spec.layout, spec.cluster, replica)
    own = spec.layout.first_rank(replica) if spec.in_process else None
    return plan_channel(spec.backend, spec.layout, spec.cluster, replica, home, own)


def channel_terms(spec: JobSpec, replica: int, plan: ChannelPlan) -> ChannelSpec:
    """Return the terms of the replica's channel between nodes."""
    root = f"rank {plan.ring[0]}" if spec.backend == "nccl" else "the driver"
    return ChannelSpec(
        name=f"channel/{replica}",
        members=(root, *(str(spec.cluster.ranks[rank]) for rank in plan.members)),
        round_id=spec.round_id,
        key=spec.key(),
    )


class EndOfJob(Exception):
    """The driver has sent STOP: the normal end."""


class RankInbox:
    """The calls for this rank. Heartbeats are handled here; a stop message raises EndOfJob."""

    def __init__(self, source: Inbox, entry: StatusEntry | NullStatusEntry) -> None:
        self._source = source
        self._entry = entry

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> WorkerCall:
        """Return the next call. Raises EndOfJob, TimeoutError, PeerLost or ChannelClosed."""
        while True:
            try:
                message = self._source.dequeue(timeout=timeout, indefinite=indefinite)
            except ChannelStopped as stopped:
                raise PeerLost("the driver has ended the control channel without a stop message") from stopped
            self._entry.turn()
            if message == Kind.STOP:
                raise EndOfJob
            if message != Kind.HEARTBEAT:
                return WorkerCall._make(cast(tuple[Any, ...], message))

    def wait_until_ready(self) -> None:
        """Return when the driver is connected."""
        self._source.wait_until_ready()

    def shutdown(self) -> None:
        """Wake a waiting dequeue."""
        self._source.shutdown()


class RelayingInbox(ShmInbox):
    """The inbox of a rank that relays: it feeds its node's ring from the network, and reads that ring too."""

    def __init__(
        self, source: BroadcastInbox, ring: ShmOutbox, on_error: Callable[[BaseException], None]
    ) -> None:
        super().__init__(ring.address, 0, encoded=True)
        self._source, self._ring, self._on_error = source, ring, on_error
        self._relay: Relay | None = None

    def wait_until_ready(self) -> None:
        """Return when all ranks of the node read the ring; the relay starts then."""
        self._ring.wait_until_ready()
        super().wait_until_ready()
        self._relay = Relay(self._source, self._ring, self._on_error)

    def shutdown(self) -> None:
        """Stop relaying, and wake a waiting dequeue."""
        if self._relay is not None:
            self._relay.shutdown()
            self._relay.join(1.0)
        super().shutdown()
        self._ring.shutdown()


class RootInbox(RingInbox):
    """The inbox of a replica's first rank with nccl: a RootRelay fills it from the driver's ring."""

    def __init__(self, driver_ring: ShmInbox, local: LocalRing) -> None:
        super().__init__(local)
        self._driver_ring = driver_ring

    def wait_until_ready(self) -> None:
        """Return when the driver is connected."""
        self._driver_ring.wait_until_ready()


class RankChannel:
    """Opens both directions; afterwards `inbox` and `reply` replace vLLM's message queues."""

    inbox: RankInbox
    reply: Outbox

    def __init__(
        self,
        spec: JobSpec,
        me: RankInfo,
        store: TorchStore,
        entry: StatusEntry | NullStatusEntry,
        on_error: Callable[[BaseException], None],
        own: InProcessChannel | None = None,
    ) -> None:
        """Prepare the channel of rank `me`.

        `on_error`: called in a relay's thread with the error that ended the relay, which is fatal.
        `own`: the channel to the driver if that runs in this process.
        """
        for name in spec.allow_classes:
            codec.allow_class(name)
        self._spec, self._me, self._store, self._entry, self._on_error = spec, me, store, entry, on_error
        self._own = own
        self._replica = spec.layout.replica(me.rank)
        self._plan = channel_plan(spec, self._replica)
        self._terms = channel_terms(spec, self._replica, self._plan) if self._plan.members else None

    def open(self) -> None:
        """Announce that the shard is loaded, and wait without limit for the driver."""
        self.inbox = RankInbox(self._open(), self._entry)

    def _open(self) -> Inbox:
        rank, plan = self._me.rank, self._plan
        loaded = loaded_key(rank)
        if rank in plan.ring:
            ring = ShmOutbox(1, RING_CHUNK_BYTES)
            self.reply = ring
            put_json(self._store, loaded, ring.address)
            return self._open_driver_ring()
        put_json(self._store, loaded, None)
        if self._own is not None:
            self.reply = self._own.replies
            return self._own.messages
        if self._spec.backend == "nccl":
            return self._open_nccl_member()
        inbox = self._open_gloo_member() if rank in plan.members else self._open_relayed_ring()
        self.reply = self._connect_reply()
        return inbox

    def _open_driver_ring(self) -> Inbox:
        ring = ShmInbox(
            self._get(ring_key(self._replica, None)),
            self._plan.ring.index(self._me.rank),
            busy_poll=self._spec.busy_poll,
        )
        if self._spec.backend != "nccl" or self._terms is None:
            return ring
        local = LocalRing()
        transport = self._nccl_transport(self._terms, 0)
        RootRelay(
            ring, BroadcastOutbox(transport, transport, self._terms, drain=False), local, self._on_error
        )
        return RootInbox(ring, local)

    def _open_nccl_member(self) -> Inbox:
        assert self._terms is not None
        self.reply = doorbell = self._connect_reply()
        transport = self._nccl_transport(self._terms, self._plan.members.index(self._me.rank) + 1)
        frames = BroadcastInbox(
            transport, transport, self._terms, doorbell=doorbell, on_heartbeat=self._entry.turn
        )
        local = LocalRing()
        Relay(frames, local, self._on_error)
        return RingInbox(local)

    def _open_gloo_member(self) -> Inbox:
        assert self._terms is not None
        rank, me = self._me.rank, self._me
        inbox = open_inbox(
            self._store,
            self._terms,
            self._plan.members.index(rank) + 1,
            interface=me.interface,
            address="" if me.interface else me.address,
            join_timeout_s=FOREVER_S,
            say=logger.info,
        )
        behind = self._plan.behind.get(rank)
        if behind is None:
            return inbox
        ring = ShmOutbox(len(behind), RING_CHUNK_BYTES)
        put_json(self._store, ring_key(self._replica, rank), ring.address)
        return RelayingInbox(inbox, ring, self._on_error)

    def _open_relayed_ring(self) -> Inbox:
        leader = self._plan.leader_of(self._me.rank)
        assert leader is not None
        reader = self._plan.behind[leader].index(self._me.rank)
        return ShmInbox(self._get(ring_key(self._replica, leader)), reader, encoded=True)

    def _nccl_transport(self, terms: ChannelSpec, member: int) -> NcclTransport:
        meet(self._store, terms, member, FOREVER_S, logger.info)
        return nccl_transport(self._store, terms, member, torch.device("cuda", torch.cuda.current_device()))

    def _connect_reply(self) -> ReplySender:
        host, port = self._get(reply_key(self._replica))
        return ReplySender(
            host, port, self._me.rank, self._spec.round_id, key=self._spec.key(), timeout_s=FOREVER_S
        )

    def _get(self, key: str) -> Any:
        return get_json(
            self._store, key, FOREVER_S, "the control channel's address", "the driver", logger.info
        )
