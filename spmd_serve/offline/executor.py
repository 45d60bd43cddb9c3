"""The executor of a script: in the process of its replica's first rank, whose own shard is a thread away."""

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
class Seat:
    """What an executor of a script must know. `failing`: this rank ends by an exception of its own."""

    spec: JobSpec
    replica: int
    own: InProcessChannel
    shard: ShardThread
    failing: Callable[[], bool]


class PendingReplies:
    """Stands before the ways to the ranks, and knows which answers are still to come.

    vLLM stops reading answers at the first rank that answers with an error. A script may catch that and go
    on: then the others' answers are read, and dropped, before the next message is sent.
    """

    def __init__(self, outbox: Any, inboxes: list[Any], busy: Callable[[], bool]) -> None:
        """`busy`: whether answers of batches in flight are to come in their own time."""
        self._outbox, self._busy = outbox, busy
        self.inboxes = [_Counted(inbox) for inbox in inboxes]

    def enqueue(self, message: Any, timeout: float | None = None) -> None:
        """Send (method, args, kwargs, rank that answers or None for all)."""
        if not self._busy():
            for inbox in self.inboxes:
                inbox.drop_due()
        self._outbox.enqueue(message, timeout)
        for inbox in self.inboxes if message[3] is None else [self.inboxes[message[3]]]:
            inbox.due += 1

    def wait_until_ready(self) -> None:
        """Do nothing: the channel is open."""

    def shutdown(self) -> None:
        """Do nothing: the executor closes the channel."""


class _Counted:
    """A rank's answers, and how many of them are due."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox
        self._rest = getattr(inbox, "rest", lambda: None)
        self.due = 0

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        # Waiting must not spin here: the shard in this process needs the interpreter lock.
        self._rest()
        answer = self._inbox.dequeue(timeout=timeout, indefinite=indefinite)
        self.due -= 1
        return answer

    def drop_due(self) -> None:
        while self.due > 0:
            self.dequeue(indefinite=True)

    def wait_until_ready(self) -> None:
        self._inbox.wait_until_ready()

    def shutdown(self) -> None:
        self._inbox.shutdown()


class ScriptExecutor(TorchrunExecutor):
    """Made by vLLM from the class that `bound_to` returns."""

    seat: ClassVar[Seat]

    @classmethod
    def bound_to(cls, seat: Seat) -> type["ScriptExecutor"]:
        """A class for one LLM: vLLM takes an executor's class, and makes the object itself."""
        return type("ScriptExecutor", (cls,), {"seat": seat, "__module__": __name__})

    def _init_executor(self) -> None:
        self.forward_passes = 0
        """Batches that ran the model (see `offline.lockstep`)."""
        super()._init_executor()
        busy = self.futures_queue
        ledger = PendingReplies(self.rpc_broadcast_mq, list(self.response_mqs), lambda: len(busy) > 0)
        self.rpc_broadcast_mq, self.response_mqs = ledger, ledger.inboxes
        self.driver_worker = self.seat.shard.worker  # as vLLM's in-process executors have it

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """As ever, and counted; an empty batch does not run the model."""
        self.forward_passes += scheduler_output.total_num_scheduled_tokens > 0
        return super().execute_model(scheduler_output, non_block)

    def _place(self) -> tuple[JobSpec, int]:
        return self.seat.spec, self.seat.replica

    def _open_channel(self) -> tuple[Any, DriverChannel]:
        channel = DriverChannel(self.seat.spec, self.seat.replica, NullStatusEntry(), self.seat.own)
        channel.open()
        return None, channel  # the rank's own line to the watcher does for both

    def shutdown(self) -> None:
        """Send the replica's ranks home, our own shard too, and return when that has ended."""
        if getattr(self, "shutting_down", True):
            return
        self.shutting_down = True
        normal = not self.seat.failing()
        self.rpc_broadcast_mq = None
        self.response_mqs = []
        self.driver_worker = None
        with suppress(TimeoutError, ChannelClosed):
            self._channel.close(normal)
        if normal:
            self.seat.shard.join(None)
