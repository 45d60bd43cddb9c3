"""Who takes part in this round of the job: a handshake on torchrun's own store.

torchrun keeps one store for all restarts, so it is full of what dead rounds wrote, and gloo would read their
addresses. The handshake trusts nothing that could have been there before:

- torchrun's rank 0 invents a nonce and writes it to `current`: the newest rank 0 is the one to follow.
- Every process has a random token. It answers each nonce with hello/<nonce>/<rank>, which holds the token.
- When rank 0 has all hellos it writes <nonce>/closed: the cluster and the tokens. It then closes the round by
  a compare-and-set on `current`, which fails if a newer rank 0 has come meanwhile.
- A process believes a cluster (or an error) only where it finds its own token in it: no dead round knows it.

All later keys live under spmd_serve/<nonce>, and the nonce is part of every name that this run gives to
anything. TORCHELASTIC_RESTART_COUNT would not do: it is counted per agent, and a change of members does not
raise it.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from spmd_serve.errors import PeerLost, SpmdError, UsageError
from spmd_serve.rendezvous.rank_assignment import Arrival, arrange
from spmd_serve.rendezvous.store import Say, Store, Wait, answered
from spmd_serve.system import network
from spmd_serve.system.torchrun_env import TorchrunEnv
from spmd_serve.topology import Cluster, by_hostname, spans

_RECLAIM_S = 2.0
_RIVAL_CLAIMS = 8  # with the pauses longer than the 30 s that torchrun leaves to ranks that it ends
_GRACE_S = 2.0
_TWICE = (
    "both claim the same place: end what is left of an earlier start, and give every node its own "
    "--node-rank (static rendezvous)"
)


def leave_together(store: Store, key: str, count: int, seconds: float = _GRACE_S) -> None:
    """Wait a moment until `count` ranks have called this with `key`: all can say the same before they end.

    The first one's end makes torchrun end the others, and takes the store along where that rank serves it.
    """
    end = time.monotonic() + seconds
    try:
        there = answered(lambda: store.add(key, 1), seconds)
        while there < count and time.monotonic() < end:
            time.sleep(0.05)
            there = answered(lambda: store.add(key, 0), seconds)
    except SpmdError:
        pass  # the store went with the rank that served it, which had waited for all others


class Handshake:
    """One process's part in it."""

    def __init__(self, store: Store, env: TorchrunEnv, hello: Arrival, deadline: float, say: Say) -> None:
        """`store`: a part of the store that no other job uses; `deadline`: time.monotonic() seconds."""
        self._store = store
        self._env = env
        self._hello = hello
        self._wait = Wait(say, deadline)
        self._seen: dict[int, tuple[str, str]] = {}  # torchrun rank -> token, host

    def lead(self, head: str | None, as_torchrun: bool = False) -> tuple[str, Cluster]:
        """torchrun's rank 0: gather the others, number all (see `arrange`), tell them."""
        round_id = secrets.token_hex(6)
        mine = f"{round_id} open"
        answered(lambda: self._answer(round_id))
        answered(lambda: self._store.set("current", mine))
        arrivals, rivals, rival_since = 0, 0, 0.0
        while True:
            count, current = answered(lambda: (self._store.add(f"{round_id}/arrivals", 0), self._current()))
            if count != arrivals:
                arrivals = count
                self._look(round_id)
            if current != mine:
                # A rank 0 of an earlier round still lives, or a second torchrun was started in its place.
                rival, _, state = current.partition(" ")
                if state == "closed":
                    raise PeerLost(f"{self._rival(rival)} has formed the run without {self._me()}")
                if state == "failed":
                    raise UsageError(self._read(f"{rival}/failed")["message"])
                rival_since = rival_since or time.monotonic()
                if time.monotonic() - rival_since > _RECLAIM_S:
                    rivals, rival_since = rivals + 1, 0.0
                    if rivals == _RIVAL_CLAIMS:
                        twice = f"{self._rival(rival)} and {self._me()} {_TWICE}"
                        self._fail(round_id, current, UsageError(twice))
                    answered(lambda: self._store.set("current", mine))
            elif len(self._seen) == self._env.world_size:
                hellos = self._hellos(round_id, range(self._env.world_size))
                try:
                    cluster = arrange(hellos, head, network.resolve(head) if head else (), as_torchrun)
                except UsageError as error:
                    self._fail(round_id, mine, error)
                if self._close(round_id, mine, cluster, hellos, arrivals):
                    return round_id, cluster
            if self._wait.left <= 0:
                self._fail(round_id, mine, self._too_late(self._seen))
            self._pause(lambda: self._missing(self._seen))

    def follow(self) -> tuple[str, Cluster]:
        """Everybody else: answer each new nonce until a cluster comes that has our token in it."""
        answered_nonce = ""
        rank, token = self._env.rank, self._hello.token
        while True:
            round_id, _, state = answered(self._current).partition(" ")
            if state == "open" and round_id != answered_nonce:
                answered(partial(self._answer, round_id))
                answered_nonce = round_id
            elif state in ("closed", "failed") and round_id == answered_nonce:
                root_cause = self._read(f"{round_id}/{state}")
                if root_cause["tokens"].get(str(rank)) == token:
                    if state == "closed":
                        return round_id, Cluster.from_json(root_cause["cluster"])
                    leave_together(self._store, f"{round_id}/told", len(root_cause["tokens"]))
                    raise UsageError(root_cause["message"])
            # Rank 0 ends the round in the same moment: let its error, which all ranks show, come first.
            if self._wait.left <= -_GRACE_S:
                raise self._too_late(self._as_rank0_sees(answered_nonce))
            self._pause(partial(self._missing_for_follower, answered_nonce))

    def _answer(self, round_id: str) -> None:
        self._store.set(f"hello/{round_id}/{self._env.rank}", self._hello.to_json())
        self._store.add(f"{round_id}/arrivals", 1)

    def _current(self) -> str:
        return self._store.get("current").decode() if self._store.check(["current"]) else ""

    def _look(self, round_id: str) -> None:
        ranks = range(self._env.world_size)
        here = answered(lambda: [rank for rank in ranks if self._store.check([f"hello/{round_id}/{rank}"])])
        self._seen = {
            hello.torchrun_rank: (hello.token, hello.hostname) for hello in self._hellos(round_id, here)
        }
        answered(lambda: self._store.set(f"{round_id}/seen", json.dumps(self._seen)))

    def _hellos(self, round_id: str, ranks: Iterable[int]) -> list[Arrival]:
        keys = [f"hello/{round_id}/{rank}" for rank in ranks]
        return [Arrival.from_json(text.decode()) for text in answered(lambda: self._store.multi_get(keys))]

    def _close(
        self, round_id: str, mine: str, cluster: Cluster, hellos: Sequence[Arrival], arrivals: int
    ) -> bool:
        tokens = {hello.torchrun_rank: hello.token for hello in hellos}
        root_cause = json.dumps({"cluster": cluster.to_json(), "tokens": tokens})

        def close() -> bool:
            if self._store.add(f"{round_id}/arrivals", 0) != arrivals:
                return False  # somebody was replaced meanwhile: look again
            self._store.set(f"{round_id}/closed", root_cause)
            return (
                self._store.compare_set("current", mine, f"{round_id} closed").decode()
                == f"{round_id} closed"
            )

        return answered(close)

    def _fail(self, round_id: str, current: str, error: UsageError) -> NoReturn:
        tokens = {rank: token for rank, (token, _) in self._seen.items()}
        root_cause = json.dumps({"message": str(error), "tokens": tokens})
        answered(lambda: self._store.set(f"{round_id}/failed", root_cause))
        answered(lambda: self._store.compare_set("current", current, f"{round_id} failed"))
        leave_together(self._store, f"{round_id}/told", len(tokens))
        raise error

    def _as_rank0_sees(self, round_id: str) -> dict[int, tuple[str, str]]:
        """Who has joined, as the living rank 0 says; nobody where it isn't known to live."""
        if not round_id or not answered(lambda: self._store.check([f"{round_id}/seen"])):
            return {}
        seen = {int(rank): (token, host) for rank, (token, host) in self._read(f"{round_id}/seen").items()}
        return seen if seen.get(self._env.rank, ("", ""))[0] == self._hello.token else {}

    def _missing(self, seen: dict[int, tuple[str, str]]) -> str:
        if not seen:
            return f"torchrun rank 0 (its store at {self._env.master_addr}:{self._env.master_port} answers)"
        absent = set(range(self._env.world_size)) - seen.keys()
        joined = by_hostname("rank", [(rank, host) for rank, (_, host) in seen.items()])
        return f"{spans('torchrun rank', absent)} (joined: {joined})" if absent else "torchrun rank 0's word"

    def _missing_for_follower(self, round_id: str) -> str:
        return self._missing(self._as_rank0_sees(round_id))

    def _too_late(self, seen: dict[int, tuple[str, str]]) -> UsageError:
        absent = (set(range(self._env.world_size)) - seen.keys() if seen else set()) or {0}
        joined = by_hostname("rank", [(rank, host) for rank, (_, host) in seen.items()]) or self._me()
        return UsageError(
            f"{spans('torchrun rank', absent)} {'has' if len(absent) == 1 else 'have'} not joined within "
            f"{self._wait.waited:.0f} s (joined: {joined}): see their logs, start torchrun with the same "
            "--nnodes, --nproc-per-node and --rdzv-endpoint on every node, or wait longer with --join-timeout"
        )

    def _me(self) -> str:
        return f"torchrun rank {self._env.rank} (process {os.getpid()} on {self._hello.hostname})"

    def _rival(self, round_id: str) -> str:
        other = self._hellos(round_id, [0])[0]
        return f"torchrun rank 0 (process {other.pid} on {other.hostname})"

    def _pause(self, what: Callable[[], str]) -> None:
        # An orphan must not go on: torchrun may have started another process in this one's place.
        if self._env.launched and os.getppid() != self._env.agent_pid:
            raise PeerLost(f"the torchrun agent (process {self._env.agent_pid}) of {self._me()} is gone")
        self._wait.pause(what)

    def _read(self, key: str) -> Any:
        return json.loads(answered(lambda: self._store.get(key)))
