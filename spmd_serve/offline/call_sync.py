"""Where ranks meet for a call, and how its result comes back: a star with rank 0 (the root) in the middle.

Members tell the root what they call over TCP (ReplySender); the root answers all at once by broadcast over a
gloo group of our own. So the root knows who has called what, and can say so; nobody waits in silence.
Messages of the root: "go" (all make the same call), "stop" (they don't), "left" (it calls nothing any more),
and the outcome of a call.
"""

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
from spmd_serve.offline.result import Outcome
from spmd_serve.rendezvous.store import FIRST_WORD_S, NEXT_WORD_S, Say, Store, get_json, put_json
from spmd_serve.topology import RankInfo

MAX_BYTES = 16 << 30
"""Longest result of a call."""
LATER_S = 5.0
"""A member waits so much longer than the root, whose word on who is missing is the better one."""
_SLICE_S = 1.0
_LAST_S = 2.0

Merge = Callable[[list[Outcome]], Outcome]


class OutOfStep(UsageError):
    """Ranks have not made the same call: says who called what. The LLM cannot be used any more."""


class Lines(Protocol):
    """One rank's end."""

    def meet(self, call: Call) -> None:
        """Return when all ranks make this call. Raises OutOfStep."""

    def conclude(self, part: Outcome | None, merge: Merge, to_all: bool) -> Outcome:
        """The outcome of the call that ranks have met for.

        `part`: this rank's own, if it drives; `merge` makes one of all drivers' parts, on the root. Without
        `to_all` only errors travel, and members get an empty outcome.
        """

    def leave(self, farewell: Call) -> None:
        """Tell the others that this rank calls nothing any more, and let go."""

    def await_end(self, timeout_s: float | None, say: Say) -> bool:
        """On a member, after `leave`: wait for the root's; False after `timeout_s` seconds."""


class Alone:
    """For a single rank."""

    def meet(self, call: Call) -> None:
        """Nobody else is to come."""

    def conclude(self, part: Outcome | None, merge: Merge, to_all: bool) -> Outcome:
        """The own part."""
        assert part is not None
        return merge([part])

    def leave(self, farewell: Call) -> None:
        """Nobody is to be told."""

    def await_end(self, timeout_s: float | None, say: Say) -> bool:
        """Nobody is waited for."""
        return True


class RootLines:
    """Rank 0's end."""

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
        """`drivers`: the members that hand in a part of each result; `timeout_s`: for ranks to meet."""
        self._me, self._drivers, self._outbox, self._inboxes = me, sorted(drivers), outbox, inboxes
        self._hosts = {me.rank: me.hostname, **{rank: info.hostname for rank, info in members.items()}}
        self._timeout_s, self._say = timeout_s, say

    def meet(self, call: Call) -> None:
        calls = {self._me.rank: call}
        started = time.monotonic()
        next_word = started + FIRST_WORD_S
        for rank, inbox in self._inboxes.items():
            while rank not in calls:
                waited = time.monotonic() - started
                if waited > self._timeout_s:
                    self._give_up(call, calls)
                if time.monotonic() > next_word:
                    next_word += NEXT_WORD_S
                    self._say(f"waiting for rank {rank} on {self._hosts[rank]} to call {call.method}()")
                with suppress(TimeoutError):
                    plain = inbox.dequeue(timeout=min(_SLICE_S, max(self._timeout_s - waited, 0.0)))
                    calls[rank] = Call.from_plain(plain)
                    if calls[rank].left:  # nothing more will come from there
                        self._stop(disagreement(calls, self._hosts))
        self._stop(disagreement(calls, self._hosts))
        self._outbox.enqueue(["go", call.number])

    def _give_up(self, call: Call, calls: dict[int, Call]) -> None:
        missing = []
        for rank, inbox in self._inboxes.items():
            if rank not in calls:
                try:
                    calls[rank] = Call.from_plain(inbox.dequeue(timeout=0.0))
                except TimeoutError:
                    missing.append(rank)
        if missing:
            self._stop(f"{absence(call.number, calls, missing, self._hosts)} within {self._timeout_s:g} s")

    def _stop(self, message: str | None) -> None:
        if message is not None:
            self._outbox.enqueue(["stop", message])
            self._outbox.flush(_LAST_S)  # we may end now
            raise OutOfStep(message)

    def conclude(self, part: Outcome | None, merge: Merge, to_all: bool) -> Outcome:
        assert part is not None
        parts = [part]
        for rank in self._drivers:
            parts.append(Outcome.from_plain(self._inboxes[rank].dequeue(indefinite=True)))
        try:
            outcome = merge(parts)
        except Exception as problem:  # members wait for a word, whatever it is
            outcome = Outcome(error=problem)
        told = outcome if to_all or outcome.error is not None else Outcome()
        try:
            self._outbox.enqueue(told.to_plain())
        except SpmdError as problem:  # not sent, for it holds what may not cross, or is too long
            outcome = Outcome(error=problem)
            self._outbox.enqueue(outcome.to_plain())
        if outcome.error is not None:
            self._outbox.flush(_LAST_S)
        return outcome

    def leave(self, farewell: Call) -> None:
        with suppress(SpmdError):
            self._outbox.enqueue(["left", farewell.to_plain()])
        self._outbox.shutdown(_LAST_S)
        for inbox in self._inboxes.values():
            inbox.shutdown()

    def await_end(self, timeout_s: float | None, say: Say) -> bool:
        return True


class MemberLines:
    """Any other rank's end."""

    def __init__(
        self, me: RankInfo, root: RankInfo, sender: ReplySender, inbox: BroadcastInbox, timeout_s: float
    ) -> None:
        self._me, self._root, self._sender, self._inbox = me, root, sender, inbox
        self._timeout_s = timeout_s
        self._left: Call | None = None

    def meet(self, call: Call) -> None:
        hosts = {self._root.rank: self._root.hostname, self._me.rank: self._me.hostname}
        if self._left is not None:
            raise OutOfStep(disagreement({self._root.rank: self._left, self._me.rank: call}, hosts) or "")
        self._sender.enqueue(call.to_plain())
        try:
            kind, what = self._hear(self._timeout_s + LATER_S)
        except TimeoutError:
            told = absence(call.number, {self._me.rank: call}, [self._root.rank], hosts)
            raise OutOfStep(f"{told} within {self._timeout_s:g} s") from None
        if kind == "left":
            self._left = Call.from_plain(what)
            raise OutOfStep(disagreement({self._root.rank: self._left, self._me.rank: call}, hosts) or "")
        if kind != "go":
            raise OutOfStep(str(what))
        assert what == call.number

    def _hear(self, timeout_s: float | None) -> Any:
        return self._inbox.dequeue(timeout=timeout_s, indefinite=timeout_s is None)

    def conclude(self, part: Outcome | None, merge: Merge, to_all: bool) -> Outcome:
        if part is not None:
            try:
                self._sender.enqueue(part.to_plain())
            except SpmdError as problem:
                self._sender.enqueue(Outcome(error=problem).to_plain())
        outcome = Outcome.from_plain(self._hear(None))
        if outcome.error is not None and part is not None and part.error is not None:
            return part  # with its traceback
        return outcome

    def leave(self, farewell: Call) -> None:
        with suppress(SpmdError):
            self._sender.enqueue(farewell.to_plain())

    def await_end(self, timeout_s: float | None, say: Say) -> bool:
        started = time.monotonic()
        next_word = started + FIRST_WORD_S
        try:
            while timeout_s is None or time.monotonic() - started < timeout_s:
                if time.monotonic() > next_word:
                    next_word += NEXT_WORD_S
                    say(f"waiting for the end of {self._root}")
                with suppress(TimeoutError):
                    self._hear(_SLICE_S)
        except ChannelStopped:
            self._inbox.shutdown()
            self._sender.shutdown()
            return True
        return False


def open_lines(
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
) -> Lines:
    """Connect `ranks`, the root first; `name` is this star's own in the store. Raises SpmdError."""
    if len(ranks) == 1:
        return Alone()
    root, *others = ranks
    spec = ChannelSpec(name, tuple(map(str, ranks)), round_id, key, max_bytes=MAX_BYTES)
    place = {"interface": me.interface, "address": "" if me.interface else me.address}
    if me.rank == root.rank:
        door = ReplyListener(me.address, round_id, key=key, max_bytes=MAX_BYTES)
        put_json(store, f"{name}/address", [door.host, door.port])
        inboxes = door.accept({info.rank: str(info) for info in others}, join_timeout_s, say)
        outbox = open_outbox(store, spec, **place, join_timeout_s=join_timeout_s, say=say)  # type: ignore[arg-type]
        members = {info.rank: info for info in others}
        driving = [rank for rank in drivers if rank != me.rank]
        return RootLines(me, members, driving, outbox, inboxes, timeout_s, say)
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
    return MemberLines(me, root, sender, inbox, timeout_s)
