"""Synchronize the calls of all ranks, and distribute their results, in a star with rank 0 as the root.

Each member sends its call to the root over TCP (ReplySender). The root answers all members at once, by a
broadcast over a gloo group of our own. So the root knows which rank makes which call, and can name the ranks
that differ or are late. The root sends "go" (all ranks make the same call), "stop" (they do not), "left" (the
root makes no further calls), and the result of a call.
"""

import functools
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Protocol

from spmd_serve.channel.base import ChannelSpec, ChannelStopped
from spmd_serve.channel.broadcast import BroadcastInbox, BroadcastOutbox
from spmd_serve.channel.gloo import open_inbox, open_outbox
from spmd_serve.channel.reply import ReplyInbox, ReplySender
from spmd_serve.channel.reply_listener import ReplyListener
from spmd_serve.errors import SpmdError, UsageError
from spmd_serve.offline.call_check import Call, absence, disagreement
from spmd_serve.offline.result import CallResult
from spmd_serve.rendezvous.store import FOREVER_S, Say, Store, Wait, get_json, put_json
from spmd_serve.topology import RankInfo

MAX_BYTES = 16 << 30
"""Maximum size of a call's encoded result, in bytes."""
EXTRA_WAIT_S = 5.0
"""A member waits this much longer than the root, whose error message names all missing ranks."""
POLL_INTERVAL_S = 1.0
FLUSH_TIMEOUT_S = 2.0

Merge = Callable[[list[CallResult]], CallResult]


class OutOfStep(UsageError):
    """The ranks did not make the same call. The message names each rank's call; the LLM is unusable."""


class CallSync(Protocol):
    """One rank's part in the synchronization."""

    def begin(self, call: Call) -> None:
        """Return when all ranks make this call. Raises OutOfStep."""

    def finish(self, part: CallResult | None, merge: Merge, to_all: bool) -> CallResult:
        """Return the result of the call that has begun.

        `part` is this rank's own result if the rank drives a replica. On the root, `merge` combines the parts
        of all drivers. Without `to_all` the root sends only errors, and members get an empty result.
        """

    def leave(self, final_call: Call) -> None:
        """Tell the other ranks that this rank makes no further calls."""

    def await_end(self, timeout_s: float | None, say: Say) -> bool:
        """After `leave`, wait until the root has left too; return False after `timeout_s` seconds."""


class SingleRankCallSync:
    """The only rank of a job: nothing is sent."""

    def begin(self, call: Call) -> None:
        """Return at once."""

    def finish(self, part: CallResult | None, merge: Merge, to_all: bool) -> CallResult:
        """Return this rank's own part."""
        assert part is not None
        return merge([part])

    def leave(self, final_call: Call) -> None:
        """Do nothing."""

    def await_end(self, timeout_s: float | None, say: Say) -> bool:
        """Return at once."""
        return True


class RootCallSync:
    """Rank 0: compares the calls, merges the results, and sends both outcomes to the members."""

    def __init__(
        self,
        me: RankInfo,
        members: dict[int, RankInfo],
        drivers: Collection[int],
        outbox: BroadcastOutbox,
        inboxes: dict[int, ReplyInbox],
        timeout_s: float,
        say: Say,
    ) -> None:
        """`drivers` are the members that send a part of each result; all ranks must call in `timeout_s`."""
        self._me, self._drivers, self._outbox, self._inboxes = me, sorted(drivers), outbox, inboxes
        self._hostnames = {me.rank: me.hostname, **{rank: info.hostname for rank, info in members.items()}}
        self._timeout_s, self._say = timeout_s, say

    def begin(self, call: Call) -> None:
        calls = {self._me.rank: call}
        wait = Wait(self._say, time.monotonic() + self._timeout_s)
        for rank, inbox in self._inboxes.items():
            while rank not in calls:
                try:
                    plain = inbox.dequeue(timeout=max(min(POLL_INTERVAL_S, wait.left), 0.0))
                except TimeoutError:
                    if wait.left <= 0:
                        break  # read what the other ranks have sent meanwhile
                    wait.pause(functools.partial(self._awaited, rank, call))
                    continue
                calls[rank] = Call.from_plain(plain)
                if calls[rank].left:  # this rank sends nothing more, so do not wait for the others
                    self._stop_if(disagreement(calls, self._hostnames))
        missing = self._inboxes.keys() - calls.keys()
        if missing:
            absent = absence(call.number, calls, missing, self._hostnames)
            self._stop_if(f"{absent} within {self._timeout_s:g} s")
        self._stop_if(disagreement(calls, self._hostnames))
        self._outbox.enqueue(["go", call.number])

    def _awaited(self, rank: int, call: Call) -> str:
        return f"rank {rank} on {self._hostnames[rank]} to call {call.method}()"

    def _stop_if(self, problem: str | None) -> None:
        if problem is not None:
            self._outbox.enqueue(["stop", problem])
            self._outbox.flush(FLUSH_TIMEOUT_S)  # this process may end now
            raise OutOfStep(problem)

    def finish(self, part: CallResult | None, merge: Merge, to_all: bool) -> CallResult:
        assert part is not None
        sent = (self._inboxes[rank].dequeue(indefinite=True) for rank in self._drivers)
        parts = [part, *map(CallResult.from_plain, sent)]
        try:
            result = merge(parts)
        except Exception as problem:  # the members wait for a result in any case
            result = CallResult(error=problem)
        try:
            self._outbox.enqueue((result if to_all or result.error else CallResult()).to_plain())
        except SpmdError as problem:  # not sent: it holds a class that is not allowed, or is too long
            result = CallResult(error=problem)
            self._outbox.enqueue(result.to_plain())
        if result.error is not None:
            self._outbox.flush(FLUSH_TIMEOUT_S)
        return result

    def leave(self, final_call: Call) -> None:
        with suppress(SpmdError):
            self._outbox.enqueue(["left", final_call.to_plain()])
        self._outbox.shutdown(FLUSH_TIMEOUT_S)
        for inbox in self._inboxes.values():
            inbox.shutdown()

    def await_end(self, timeout_s: float | None, say: Say) -> bool:
        return True


class MemberCallSync:
    """Any other rank: sends its calls to the root, and waits for the root's messages."""

    def __init__(
        self, me: RankInfo, root: RankInfo, sender: ReplySender, inbox: BroadcastInbox, timeout_s: float
    ) -> None:
        self._me, self._root, self._sender, self._inbox = me, root, sender, inbox
        self._hostnames = {root.rank: root.hostname, me.rank: me.hostname}
        self._timeout_s = timeout_s
        self._root_left: Call | None = None

    def begin(self, call: Call) -> None:
        if self._root_left is None:
            self._sender.enqueue(call.to_plain())
            try:
                message: Any = self._inbox.dequeue(timeout=self._timeout_s + EXTRA_WAIT_S)
            except TimeoutError:
                absent = absence(call.number, {self._me.rank: call}, [self._root.rank], self._hostnames)
                raise OutOfStep(f"{absent} within {self._timeout_s:g} s") from None
            kind, content = message
            if kind == "go":
                assert content == call.number
                return
            if kind == "stop":
                raise OutOfStep(str(content))
            self._root_left = Call.from_plain(content)
        calls = {self._root.rank: self._root_left, self._me.rank: call}
        raise OutOfStep(disagreement(calls, self._hostnames) or "")

    def finish(self, part: CallResult | None, merge: Merge, to_all: bool) -> CallResult:
        if part is not None:
            try:
                self._sender.enqueue(part.to_plain())
            except SpmdError as problem:
                self._sender.enqueue(CallResult(error=problem).to_plain())
        result = CallResult.from_plain(self._inbox.dequeue(indefinite=True))
        if result.error is not None and part is not None and part.error is not None:
            return part  # it has the traceback
        return result

    def leave(self, final_call: Call) -> None:
        with suppress(SpmdError):
            self._sender.enqueue(final_call.to_plain())

    def await_end(self, timeout_s: float | None, say: Say) -> bool:
        wait = Wait(say, time.monotonic() + (FOREVER_S if timeout_s is None else timeout_s))
        try:
            while wait.left > 0:
                try:
                    self._inbox.dequeue(timeout=POLL_INTERVAL_S)
                except TimeoutError:
                    wait.pause(lambda: f"the end of {self._root}")
        except ChannelStopped:
            self._inbox.shutdown()
            self._sender.shutdown()
            return True
        return False


def open_call_sync(
    store: Store,
    name: str,
    ranks: list[RankInfo],
    me: RankInfo,
    drivers: Collection[int],
    *,
    round_id: str,
    key: bytes | None,
    timeout_s: float,
    join_timeout_s: float,
    say: Say,
) -> CallSync:
    """Connect `ranks`, of which the first is the root. `name` is a prefix in the store. Raises SpmdError."""
    if len(ranks) == 1:
        return SingleRankCallSync()
    root, *others = ranks
    spec = ChannelSpec(name, tuple(map(str, ranks)), round_id, key, max_bytes=MAX_BYTES)
    place = {"interface": me.interface, "address": "" if me.interface else me.address}
    if me.rank == root.rank:
        listener = ReplyListener(me.address, round_id, key=key, max_bytes=MAX_BYTES)
        put_json(store, f"{name}/address", [listener.host, listener.port])
        inboxes = listener.accept({info.rank: str(info) for info in others}, join_timeout_s, say)
        outbox = open_outbox(store, spec, **place, join_timeout_s=join_timeout_s, say=say)  # type: ignore[arg-type]
        members = {info.rank: info for info in others}
        driving = [rank for rank in drivers if rank != me.rank]
        return RootCallSync(me, members, driving, outbox, inboxes, timeout_s, say)
    host, port = get_json(store, f"{name}/address", join_timeout_s, "the engine", str(root), say)
    sender = ReplySender(
        host,
        port,
        me.rank,
        round_id,
        key=key,
        driver=str(root),
        timeout_s=join_timeout_s,
        max_bytes=MAX_BYTES,
    )
    member = 1 + [info.rank for info in others].index(me.rank)
    inbox = open_inbox(store, spec, member, **place, join_timeout_s=join_timeout_s, say=say)  # type: ignore[arg-type]
    return MemberCallSync(me, root, sender, inbox, timeout_s)
