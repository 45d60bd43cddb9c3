"""The processes above a watcher: the rank that forked it, and the torchrun agent above that."""

import os
from typing import Protocol

from spmd_serve.liveness import words
from spmd_serve.liveness.judge import Accusation, Weight
from spmd_serve.liveness.loop import Loop
from spmd_serve.liveness.members import Members


class FamilyCourt(Protocol):
    """What the watcher does with their ends."""

    @property
    def host(self) -> str: ...
    def accuse(self, accusation: Accusation) -> None: ...


class Family:
    """Watches both by pidfd; neither needs to have said hello."""

    def __init__(
        self,
        court: FamilyCourt,
        loop: Loop,
        members: Members,
        parent: tuple[int, int],
        agent: tuple[int, int] | None,
    ) -> None:
        """`parent`, `agent`: pid and pidfd."""
        self._court = court
        self._loop = loop
        self._members = members
        self._parent = parent[0]
        self._parent_alive = True
        loop.watch_end(parent[1], lambda _events: self._parent_gone(parent[1]))
        if agent is not None:
            loop.watch_end(agent[1], lambda _events: self._agent_gone(*agent))

    def _parent_said_hello(self) -> bool:
        return any(member.pid == self._parent for member in self._members.all)

    @property
    def parent_may_join(self) -> bool:
        """Whether the first member is still to come."""
        return self._parent_alive and not self._parent_said_hello()

    def _parent_gone(self, pidfd: int) -> None:
        self._close(pidfd)
        self._parent_alive = False
        self._members.close_door()
        if self._members.alive and not self._parent_said_hello():
            who = words.member("local rank 0", self._parent, self._court.host)
            self._accuse(self._parent, Weight.WORDLESS, words.ended(who, None, False))

    def _agent_gone(self, pid: int, pidfd: int) -> None:
        self._close(pidfd)
        self._accuse(pid, Weight.OWN, words.agent_gone(pid, self._court.host))

    def _close(self, pidfd: int) -> None:
        self._loop.forget(pidfd)
        os.close(pidfd)

    def _accuse(self, pid: int, weight: Weight, cause: str) -> None:
        # Before all members of the same moment, whose ancestors they are.
        host = self._court.host
        self._court.accuse(Accusation(f"{host} {pid} end", weight, cause, None, host, order=-1))
