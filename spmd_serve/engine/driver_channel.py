"""A driver's ends of the control channel: an outbox to its ranks, an inbox for each rank's replies."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import vllm.envs as envs

from spmd_serve.channel.base import ChannelClosed, Inbox, Outbox
from spmd_serve.channel.gloo import open_outbox
from spmd_serve.channel.in_process import InProcessChannel
from spmd_serve.channel.nccl import DoorbellOutbox
from spmd_serve.channel.plan import driver_node
from spmd_serve.channel.reply import ReplyInbox
from spmd_serve.channel.reply_listener import ReplyListener
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.shm_ring import ShmInbox, ShmOutbox
from spmd_serve.engine.worker_channel import channel_plan, channel_terms, loaded_key, reply_key, ring_key
from spmd_serve.errors import PeerLost
from spmd_serve.liveness import NullStatusEntry, StatusEntry
from spmd_serve.rendezvous.join import connect_store, get_json, put_json, wait_keys
from spmd_serve.rendezvous.store import FOREVER_S
from spmd_serve.wire import codec
from spmd_serve.wire.frames import Kind

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Route:
    """One way from the driver to some of its ranks."""

    outbox: Outbox
    network: bool = False
    """Whether its bytes count as network traffic; the others stay inside the node."""
    send_heartbeat: Callable[[], object] | None = None
    """Sends a heartbeat without waiting; by default it is a message like any other."""

    def heartbeat(self) -> None:
        """Send a heartbeat without waiting. A full route needs none: its readers have messages to read."""
        if self.send_heartbeat is not None:
            self.send_heartbeat()
            return
        with suppress(TimeoutError):
            self.outbox.enqueue(int(Kind.HEARTBEAT), timeout=0.0)


class DriverOutbox:
    """Sends every message to all ranks of the replica, over all routes."""

    def __init__(self, routes: list[Route], entry: StatusEntry | NullStatusEntry) -> None:
        """`routes`: the slowest first, so that all ranks get a message at nearly the same time.

        `entry`: counts the messages.
        """
        self._routes = routes
        self._entry = entry
        self._lock = threading.Lock()
        self.sent_at = time.monotonic()

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send `obj`, a WorkerCall or the number of a Kind, to every rank.

        Raises TimeoutError if a rank accepts nothing for `timeout` seconds.
        """
        begun = time.monotonic()
        node_bytes = network_bytes = 0
        with self._lock:
            for route in self._routes:
                size = route.outbox.enqueue(obj, timeout) or 0
                if route.network:
                    network_bytes += size
                else:
                    node_bytes += size
        self.sent_at = time.monotonic()
        self._entry.sent(node_bytes, network_bytes, self.sent_at - begun)

    def heartbeat(self) -> None:
        """Send a heartbeat to every rank without waiting; do nothing while another thread sends."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for route in self._routes:
                route.heartbeat()
        finally:
            self._lock.release()
        self.sent_at = time.monotonic()

    def wait_until_ready(self) -> None:
        """Return when every rank is connected."""
        for route in self._routes:
            route.outbox.wait_until_ready()

    def shutdown(self) -> None:
        """Close all routes."""
        for route in self._routes:
            route.outbox.shutdown()


class DriverChannel:
    """Opens both directions; afterwards `outbox` and `replies` replace vLLM's message queues."""

    outbox: DriverOutbox
    replies: list[Inbox]
    """One inbox per rank of the replica, in the order of the ranks."""

    def __init__(
        self,
        spec: JobSpec,
        replica: int,
        entry: StatusEntry | NullStatusEntry,
        own: InProcessChannel | None = None,
    ) -> None:
        """`entry`: counts the messages; `own`: the channel to the replica's first rank in this process."""
        for name in spec.allow_classes:
            codec.allow_class(name)
        self._spec = spec
        self._replica = replica
        self._own = own
        self._entry = entry
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def open(self) -> None:
        """Connect to all ranks. Wait until they have loaded their shards; log which ranks are missing."""
        spec, replica, plan = self._spec, self._replica, channel_plan(self._spec, self._replica)
        # A rank of this node: its interface and address are valid here.
        here = spec.cluster.nodes[driver_node(spec.lb, spec.layout, spec.cluster, replica)][0]
        store = connect_store(spec.store_host, spec.store_port, spec.round_id, spec.join_timeout_s)
        names = {rank: str(spec.cluster.ranks[rank]) for rank in spec.layout.replica_ranks(replica)}
        ring = listener = None
        if plan.ring:
            ring = ShmOutbox(len(plan.ring), envs.VLLM_MQ_MAX_CHUNK_BYTES_MB << 20)
            put_json(store, ring_key(replica, None), ring.address)
        if plan.members:
            listener = ReplyListener(here.address, spec.round_id, key=spec.key())
            put_json(store, reply_key(replica), [listener.host, listener.port])
        loaded = {loaded_key(rank): name for rank, name in names.items()}
        wait_keys(store, loaded, time.monotonic() + FOREVER_S, logger.info, what="the loaded shard")
        routes: list[Route] = []
        if plan.members and spec.backend != "nccl":
            outbox = open_outbox(
                store,
                channel_terms(spec, replica, plan),
                interface=here.interface,
                address="" if here.interface else here.address,
                join_timeout_s=spec.join_timeout_s,
                say=logger.info,
            )
            routes.append(Route(outbox, network=True))
        replies: dict[int, Inbox] = {}
        if self._own is not None:
            routes.append(Route(self._own.messages))
            replies[spec.layout.first_rank(replica)] = self._own.replies
        for rank in plan.ring:
            address = get_json(store, loaded_key(rank), spec.join_timeout_s, "the reply ring", names[rank])
            replies[rank] = ShmInbox(address, 0, busy_poll=spec.busy_poll)
        remote: dict[int, ReplyInbox] = {}
        if listener is not None:
            expected = {rank: name for rank, name in names.items() if rank not in replies}
            remote = listener.accept(expected, spec.join_timeout_s, logger.info)
            replies.update(remote)
        if ring is not None:
            if spec.backend == "nccl" and plan.members:
                doorbell = DoorbellOutbox(ring, [remote[rank] for rank in plan.members])
                routes.append(Route(doorbell, network=True, send_heartbeat=doorbell.heartbeat))
            else:
                routes.append(Route(ring))
            ring.wait_until_ready()
        self.outbox = DriverOutbox(routes, self._entry)
        self.replies = [replies[rank] for rank in names]
        for rank in plan.ring:
            replies[rank].wait_until_ready()

    def ready(self) -> None:
        """Declare that the ranks accept batches: from now on the watcher expects this driver's heartbeats."""
        self._entry.state("ready")

    def start_heartbeat(self) -> None:
        """Send a heartbeat after every `heartbeat_s` seconds without a message."""
        self._heartbeat.start()

    def _send_heartbeats(self) -> None:
        interval = self._spec.heartbeat_s
        while not self._ended.wait(max(0.05, self.outbox.sent_at + interval - time.monotonic())):
            self._entry.turn()
            if time.monotonic() - self.outbox.sent_at >= interval:
                try:
                    self.outbox.heartbeat()
                except (PeerLost, ChannelClosed):
                    return  # the watcher finds and reports the lost process

    def close(self, normal: bool) -> None:
        """Close the channel; at a `normal` end, tell the ranks first that the job is over."""
        self._ended.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join(1.0)
        if normal:
            self.outbox.enqueue(int(Kind.STOP), timeout=STOP_TIMEOUT_S)
            self.outbox.shutdown()
        for reply in self.replies:
            reply.shutdown()
        # The rings' shared memory is removed with the last reference.
        del self.outbox
        self.replies = []
