"""The driver's ends of the control channel: the way to its replica's ranks, and a reply queue from each."""

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import vllm.envs as envs

from spmd_serve.channel.base import ChannelClosed
from spmd_serve.channel.gloo import open_outbox
from spmd_serve.channel.in_process import InProcessChannel
from spmd_serve.channel.nccl import DoorbellOutbox
from spmd_serve.channel.plan import driver_node
from spmd_serve.channel.reply_listener import ReplyListener
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.shm_ring import RingInbox, RingOutbox
from spmd_serve.engine.worker_channel import (
    HEARTBEAT,
    STOP,
    channel_plan,
    channel_terms,
    door_key,
    loaded_key,
    ring_key,
)
from spmd_serve.errors import PeerLost
from spmd_serve.liveness import NullStatusEntry, StatusEntry
from spmd_serve.rendezvous.join import connect_store, get_json, put_json, wait_keys
from spmd_serve.rendezvous.store import FOREVER_S
from spmd_serve.topology import RankInfo
from spmd_serve.wire import codec

logger = logging.getLogger(__name__)

_STOP_S = 5.0


class DriverOutbox:
    """Sends every message to all ranks of the replica, whatever way they are reached."""

    def __init__(self, ways: list[Any], entry: StatusEntry | NullStatusEntry) -> None:
        """`ways`: outboxes; the slower first, so that all ranks have a message at nearly the same time.

        `entry`: where messages are counted.
        """
        self._ways = ways
        self._entry = entry
        self._lock = threading.Lock()
        self.sent_at = time.monotonic()

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send (method, args, kwargs, output_rank); TimeoutError if a rank takes nothing in `timeout` s."""
        begun = time.monotonic()
        host_bytes = network_bytes = 0
        with self._lock:
            for way in self._ways:
                sent = way.enqueue(obj, timeout)
                if isinstance(way, RingOutbox):
                    host_bytes += way.last_bytes()
                else:
                    network_bytes += sent or 0
        self.sent_at = time.monotonic()
        self._entry.sent(host_bytes, network_bytes, self.sent_at - begun)

    def heartbeat(self) -> None:
        """A sign of life to every rank. Never waits: what is full holds signs enough for a busy reader."""
        if not self._lock.acquire(blocking=False):
            return  # somebody sends
        try:
            for way in self._ways:
                if isinstance(way, DoorbellOutbox):
                    way.heartbeat()
                else:
                    with suppress(TimeoutError):
                        way.enqueue((HEARTBEAT, (), {}, None), timeout=0.0)
        finally:
            self._lock.release()
        self.sent_at = time.monotonic()

    def wait_until_ready(self) -> None:
        """Return when every rank is connected."""
        for way in self._ways:
            way.wait_until_ready()

    def shutdown(self) -> None:
        """Let go of all ways."""
        for way in self._ways:
            way.shutdown()


class DriverChannel:
    """Opens both directions; afterwards `outbox` and `replies` stand in for vLLM's message queues."""

    def __init__(
        self, spec: JobSpec, replica: int, entry: StatusEntry | NullStatusEntry, own: InProcessChannel | None = None
    ) -> None:
        """`entry`: where messages are counted; `own`: the way to the replica's first rank in this process."""
        for name in spec.allow_classes:
            codec.allow_class(name)
        self._spec = spec
        self._replica = replica
        self._own = own
        self._entry = entry
        self._plan = channel_plan(spec, replica)
        self._ended = threading.Event()
        self.threads: list[threading.Thread] = []
        self.outbox: DriverOutbox
        self.replies: list[Any] = []

    @property
    def _home(self) -> RankInfo:
        """A rank of this host: its interface and address are ours."""
        node = driver_node(self._spec.lb, self._spec.layout, self._spec.cluster, self._replica)
        return self._spec.cluster.nodes[node][0]

    def open(self) -> None:
        """Connect to all ranks; waits, with a word on who is missing, until they have loaded their shards."""
        spec, plan, replica = self._spec, self._plan, self._replica
        store = connect_store(spec.store_host, spec.store_port, spec.round_id, spec.join_timeout_s)
        ranks = spec.layout.replica_ranks(replica)
        who = {rank: str(spec.cluster.ranks[rank]) for rank in ranks}
        ring = door = None
        if plan.ring:
            ring = RingOutbox(len(plan.ring), envs.VLLM_MQ_MAX_CHUNK_BYTES_MB << 20)
            put_json(store, ring_key(replica, None), ring.address)
        if plan.members:
            door = ReplyListener(self._home.address, spec.round_id, key=spec.key())
            put_json(store, door_key(replica), [door.host, door.port])
        loaded = {loaded_key(rank): name for rank, name in who.items()}
        wait_keys(store, loaded, time.monotonic() + FOREVER_S, logger.info, what="the loaded shard")
        ways: list[Any] = []
        if plan.members and spec.backend != "nccl":
            ways.append(
                open_outbox(
                    store,
                    channel_terms(spec, replica, plan),
                    interface=self._home.interface,
                    address="" if self._home.interface else self._home.address,
                    join_timeout_s=spec.join_timeout_s,
                    say=logger.info,
                )
            )
        replies: dict[int, Any] = {}
        if self._own is not None:
            ways.append(self._own.messages)
            replies[spec.layout.first_rank(replica)] = self._own.replies
        for rank in plan.ring:
            address = get_json(store, loaded_key(rank), spec.join_timeout_s, "the reply ring", who[rank])
            replies[rank] = RingInbox(address, 0, spin=spec.busy_poll)
        if door is not None:
            remote = {rank: name for rank, name in who.items() if rank not in replies}
            replies.update(door.accept(remote, spec.join_timeout_s, logger.info))
        if ring is not None:
            doorbells = [replies[rank] for rank in plan.members]
            ways.append(DoorbellOutbox(ring, doorbells) if spec.backend == "nccl" and doorbells else ring)
            ring.wait_until_ready()
        self.outbox = DriverOutbox(ways, self._entry)
        self.replies = [replies[rank] for rank in ranks]
        for rank in plan.ring:
            replies[rank].wait_until_ready()

    def loaded(self) -> None:
        """The ranks take batches now: this driver promises heartbeats to the watcher too."""
        self._entry.state("ready")

    def start_heartbeat(self) -> None:
        """From now on the ranks hear from us at least every `heartbeat_s` seconds."""
        thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.threads.append(thread)
        thread.start()

    def _beat(self) -> None:
        every = self._spec.heartbeat_s
        while not self._ended.wait(max(0.05, self.outbox.sent_at + every - time.monotonic())):
            self._entry.turn()
            if time.monotonic() - self.outbox.sent_at >= every:
                try:
                    self.outbox.heartbeat()
                except (PeerLost, ChannelClosed):
                    return  # who is lost, and why, is the watcher's business

    def close(self, normal: bool) -> None:
        """Tell the ranks that the job is over (a normal end), and let go."""
        self._ended.set()
        for thread in self.threads:
            thread.join(1.0)
        if normal:
            self.outbox.enqueue((STOP, (), {}, None), timeout=_STOP_S)
            self.outbox.shutdown()
        for reply in self.replies:
            reply.shutdown()
        # The rings' shared memory goes with the last reference.
        del self.outbox
        self.replies = []
