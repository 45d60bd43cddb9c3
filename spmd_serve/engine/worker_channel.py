"""The rank's ends of the control channel: where its driver's messages arrive, where its replies go."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from spmd_serve.channel.base import ChannelSpec, ChannelStopped
from spmd_serve.channel.broadcast import BroadcastInbox, BroadcastOutbox
from spmd_serve.channel.gloo import meet, open_inbox
from spmd_serve.channel.in_process import InProcessChannel
from spmd_serve.channel.nccl import RootRelay, nccl_transport
from spmd_serve.channel.plan import ChannelPlan, driver_node, plan_channel
from spmd_serve.channel.relay import LocalRing, Relay
from spmd_serve.channel.relay import RingInbox as EncodedInbox
from spmd_serve.channel.reply import ReplySender
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.shm_ring import RingInbox, RingOutbox
from spmd_serve.errors import PeerLost
from spmd_serve.liveness import NullStatusEntry, StatusEntry
from spmd_serve.rendezvous.store import FOREVER_S, get_json, put_json
from spmd_serve.topology import RankInfo
from spmd_serve.wire import codec

logger = logging.getLogger(__name__)

HEARTBEAT = "spmd_serve.heartbeat"
STOP = "spmd_serve.stop"

RING_CHUNK_BYTES = 4 << 20
"""Slot size of rings that carry replies, or what a relay received; longer ones go over their socket."""


def ring_key(replica: int, leader: int | None) -> str:
    """Store key of a ring's address: the driver's own (leader None), or that of another host's leader."""
    return f"channel/{replica}/ring/{'driver' if leader is None else leader}"


def door_key(replica: int) -> str:
    """Store key of the driver's (host, port) for replies from other hosts."""
    return f"channel/{replica}/door"


def loaded_key(rank: int) -> str:
    """Store key by which a rank says that its shard is loaded, with its reply ring's address or null."""
    return f"channel/loaded/{rank}"


def channel_plan(spec: JobSpec, replica: int) -> ChannelPlan:
    """How the replica's ranks are reached."""
    home = driver_node(spec.lb, spec.layout, spec.cluster, replica)
    own = spec.layout.first_rank(replica) if spec.in_process else None
    return plan_channel(spec.backend, spec.layout, spec.cluster, replica, home, own)


def channel_terms(spec: JobSpec, replica: int, plan: ChannelPlan) -> ChannelSpec:
    """The terms of the replica's channel between hosts."""
    root = f"rank {plan.ring[0]}" if spec.backend == "nccl" else "the driver"
    return ChannelSpec(
        name=f"channel/{replica}",
        members=(root, *(str(spec.cluster.ranks[rank]) for rank in plan.members)),
        round_id=spec.round_id,
        key=spec.key(),
    )


class RankInbox:
    """Messages for this rank; answers heartbeats itself and turns a stop message into `EndOfJob`."""

    def __init__(self, source: Any, entry: StatusEntry | NullStatusEntry) -> None:
        self._source = source
        self._rest = getattr(source, "rest", lambda: None)
        self._entry = entry

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next (method, args, kwargs, output_rank). EndOfJob, TimeoutError, PeerLost, ChannelClosed."""
        while True:
            try:
                message = self._source.dequeue(timeout=timeout, indefinite=indefinite)
            except ChannelStopped as stopped:
                raise PeerLost("the driver has ended the control channel without a word") from stopped
            self._entry.turn()
            if message[0] == HEARTBEAT:
                self._rest()
            elif message[0] == STOP:
                raise EndOfJob
            else:
                return message

    def wait_until_ready(self) -> None:
        """Return when the driver is connected."""
        self._source.wait_until_ready()

    def shutdown(self) -> None:
        """Wake a waiting dequeue."""
        self._source.shutdown()


class EndOfJob(Exception):
    """The driver said stop: not an error."""


class RelayedRing:
    """On another host's leader: feeds the host's ring from the network, and reads it like its neighbours."""

    def __init__(
        self, source: BroadcastInbox, ring: RingOutbox, on_error: Callable[[BaseException], None]
    ) -> None:
        self._source, self._ring, self._on_error = source, ring, on_error
        self._reader = RingInbox(ring.address, 0, encoded=True)
        self._relay: Relay | None = None
        self.dequeue = self._reader.dequeue
        self.rest = self._reader.rest

    def wait_until_ready(self) -> None:
        """Return when all ranks of the host read the ring; messages flow from then on."""
        self._ring.wait_until_ready()
        self._reader.wait_until_ready()
        self._relay = Relay(self._source, self._ring, self._on_error)

    def shutdown(self) -> None:
        """Stop relaying, wake a waiting dequeue."""
        if self._relay is not None:
            self._relay.shutdown()
            self._relay.join(1.0)
        self._reader.shutdown()
        self._ring.shutdown()


class RankChannel:
    """Opens both directions; afterwards `inbox` and `reply` stand in for vLLM's message queues."""

    def __init__(
        self,
        spec: JobSpec,
        me: RankInfo,
        store: TorchStore,
        entry: StatusEntry | NullStatusEntry,
        on_error: Callable[[BaseException], None],
        own: InProcessChannel | None = None,
    ) -> None:
        """`on_error`: called in a relay's thread with what ended it; the rank cannot go on then.

        `own`: the way to the driver, when that is in this process.
        """
        for name in spec.allow_classes:
            codec.allow_class(name)
        self._spec, self._me, self._store, self._entry, self._on_error = spec, me, store, entry, on_error
        self._own = own
        self._replica = spec.layout.replica(me.rank)
        self._plan = channel_plan(spec, self._replica)
        self.inbox: RankInbox
        self.reply: Any

    def open(self) -> None:
        """Say that the shard is loaded, and connect to the driver; it may take long until that one is up."""
        rank = self._me.rank
        if self._own is not None:
            put_json(self._store, loaded_key(rank), None)
            source: Any = self._own.messages
            self.reply = self._own.replies
        elif rank in self._plan.ring:
            self.reply = RingOutbox(1, RING_CHUNK_BYTES)
            put_json(self._store, loaded_key(rank), self.reply.address)
            ring = RingInbox(
                self._get(ring_key(self._replica, None)),
                self._plan.ring.index(rank),
                spin=self._spec.busy_poll,
            )
            source = self._root(ring) if self._spec.backend == "nccl" else ring
        else:
            put_json(self._store, loaded_key(rank), None)
            source = self._network() if rank in self._plan.members else None
            if source is None:
                leader = self._plan.leader_of(rank)
                assert leader is not None
                place = self._plan.behind[leader].index(rank)
                source = RingInbox(self._get(ring_key(self._replica, leader)), place, encoded=True)
            if self._spec.backend != "nccl":
                self.reply = self._sender()
        self.inbox = RankInbox(source, self._entry)

    def _network(self) -> Any:
        rank, spec = self._me.rank, self._spec
        terms = channel_terms(spec, self._replica, self._plan)
        member = self._plan.members.index(rank) + 1
        if spec.backend == "nccl":
            self.reply = self._sender()
            transport = self._nccl_transport(terms, member)
            frames = BroadcastInbox(
                transport, transport, terms, doorbell=self.reply, on_heartbeat=self._entry.turn
            )
            mine = LocalRing()
            Relay(frames, mine, self._on_error)
            return EncodedInbox(mine)
        inbox = open_inbox(
            self._store,
            terms,
            member,
            interface=self._me.interface,
            address="" if self._me.interface else self._me.address,
            join_timeout_s=FOREVER_S,
            say=logger.info,
        )
        behind = self._plan.behind.get(rank)
        if behind is None:
            return inbox
        ring = RingOutbox(len(behind), RING_CHUNK_BYTES)
        put_json(self._store, ring_key(self._replica, rank), ring.address)
        return RelayedRing(inbox, ring, self._on_error)

    def _root(self, ring: RingInbox) -> Any:
        """nccl, on the replica's first rank: what the driver writes here goes to all others."""
        mine = LocalRing()
        if not self._plan.members:
            return ring
        terms = channel_terms(self._spec, self._replica, self._plan)
        transport = self._nccl_transport(terms, 0)
        RootRelay(ring, BroadcastOutbox(transport, transport, terms, drain=False), mine, self._on_error)
        inbox = EncodedInbox(mine)
        inbox.wait_until_ready = ring.wait_until_ready  # type: ignore[method-assign]
        return inbox

    def _nccl_transport(self, terms: ChannelSpec, member: int) -> Any:
        meet(self._store, terms, member, FOREVER_S, logger.info)
        return nccl_transport(self._store, terms, member, torch.device("cuda", torch.cuda.current_device()))

    def _sender(self) -> ReplySender:
        host, port = self._get(door_key(self._replica))
        return ReplySender(
            host, port, self._me.rank, self._spec.round_id, key=self._spec.key(), timeout_s=FOREVER_S
        )

    def _get(self, key: str) -> Any:
        return get_json(
            self._store, key, FOREVER_S, "the control channel's address", "the driver", logger.info
        )
