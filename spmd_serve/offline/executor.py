"""vLLM's executor inside a script: it runs on the first rank of its replica, beside that rank's shard."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from spmd_serve.channel.base import ChannelClosed
from spmd_serve.channel.in_process import InProcessChannel
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.driver_channel import DriverChannel
from spmd_serve.engine.executor import TorchrunExecutor
from spmd_serve.liveness import NullStatusEntry
from spmd_serve.offline.worker_thread import ShardThread


@dataclass(frozen=True)
class ExecutorContext:
    """The objects that an executor of a script uses. `failing()`: this rank is ending with an exception."""

    spec: JobSpec
    replica: int
    own: InProcessChannel
    shard: ShardThread
    failing: Callable[[], bool]


class PendingReplies:
    """Wrap the outbox and the inboxes of a replica, and count the replies that are still to come.

    vLLM stops reading replies at the first rank that replies with an error. The script may catch that error
    and go on: the replies of the other ranks are then read and dropped before the next message is sent.
    """

    def __init__(self, outbox: Any, inboxes: list[Any], busy: Callable[[], bool]) -> None:
        """`busy()`: batches are in flight, whose replies are read later."""
        self._outbox, self._busy = outbox, busy
        self.inboxes = [_CountingInbox(inbox) for inbox in inboxes]

    def enqueue(self, message: Any, timeout: float | None = None) -> None:
        """Send (method, args, kwargs, rank that replies or None for all)."""
        if not self._busy():
            for inbox in self.inboxes:
                inbox.drop_pending()
        self._outbox.enqueue(message, timeout)
        for inbox in self.inboxes if message[3] is None else [self.inboxes[message[3]]]:
            inbox.pending += 1

    def wait_until_ready(self) -> None:
        """Do nothing: the channel is open."""

    def shutdown(self) -> None:
        """Do nothing: the channel closes the outbox."""


class _CountingInbox:
    """The replies of one rank; `pending` of them are still to come."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox
        self._rest = getattr(inbox, "rest", lambda: None)
        self.pending = 0

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        # Do not busy poll here: the shard in this process needs the interpreter lock.
        self._rest()
        reply = self._inbox.dequeue(timeout=timeout, indefinite=indefinite)
        self.pending -= 1
        return reply

    def drop_pending(self) -> None:
        while self.pending > 0:
            self.dequeue(indefinite=True)

    def wait_until_ready(self) -> None:
        self._inbox.wait_until_ready()

    def shutdown(self) -> None:
        self._inbox.shutdown()


class ScriptExecutor(TorchrunExecutor):
    """vLLM creates the executor from the class that `bound_to` returns."""

    context: ClassVar[ExecutorContext]

    @classmethod
    def bound_to(cls, context: ExecutorContext) -> type["ScriptExecutor"]:
        """Return a class for one LLM: vLLM takes the class of an executor, and creates the object itself."""
        return type("ScriptExecutor", (cls,), {"context": context, "__module__": __name__})

    def _init_executor(self) -> None:
        self.forward_passes = 0
        """Number of batches that ran the model (see `offline.moe_lockstep`)."""
        super()._init_executor()
        in_flight = self.futures_queue
        replies = PendingReplies(self.rpc_broadcast_mq, list(self.response_mqs), lambda: len(in_flight) > 0)
        self.rpc_broadcast_mq, self.response_mqs = replies, replies.inboxes
        self.driver_worker = self.context.shard.worker  # as vLLM's in-process executors have it

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Execute and count a batch; an empty batch does not run the model."""
        self.forward_passes += scheduler_output.total_num_scheduled_tokens > 0
        return super().execute_model(scheduler_output, non_block)

    def _place(self) -> tuple[JobSpec, int]:
        return self.context.spec, self.context.replica

    def _open_channel(self) -> tuple[Any, DriverChannel]:
        channel = DriverChannel(self.context.spec, self.context.replica, NullStatusEntry(), self.context.own)
        channel.open()
        return None, channel  # the rank's own connection to the watcher serves the driver too

    def shutdown(self) -> None:
        """Stop the shards of the replica, and wait until the shard of this rank has ended."""
        if getattr(self, "shutting_down", True):
            return
        self.shutting_down = True
        normal = not self.context.failing()
        self.rpc_broadcast_mq = None
        self.response_mqs = []
        self.driver_worker = None
        with suppress(TimeoutError, ChannelClosed):
            self._channel.close(normal)
        if normal:
            self.context.shard.join(None)
