"""The processes above a watcher: the rank that forked it, and the torchrun agent above that."""

import contextlib
import os
from typing import Protocol

from spmd_serve.liveness import descriptions
from spmd_serve.liveness.event_loop import Loop
from spmd_serve.liveness.members import Members
from spmd_serve.liveness.procfs import ProcFile
from spmd_serve.liveness.root_cause import FailureReport, Weight


class FamilyCourt(Protocol):
    """What the watcher does with their ends."""

    @property
    def host(self) -> str: ...
    def report_failure(self, failure: FailureReport) -> None: ...


class Ancestors:
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
        self._agent = agent
        self._agent_stat: ProcFile | None = None
        loop.watch_end(parent[1], lambda _events: self._parent_gone(parent[1]))
        if agent is not None:
            loop.watch_end(agent[1], lambda _events: self._agent_gone())
            with contextlib.suppress(OSError):  # gone already, which the pidfd tells
                self._agent_stat = ProcFile(agent[0])

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
            who = descriptions.member("local rank 0", self._parent, self._court.host)
            self._report_failure(self._parent, Weight.UNEXPLAINED, descriptions.ended(who, None, False))

    def look(self) -> None:
        """At a member's death: the agent's may be its cause, though the agent's last thread still runs."""
        if self._agent is not None and self._agent_stat is not None:
            look = self._agent_stat.read()
            if look is None or look.dying:
                self._agent_gone()

    def _agent_gone(self) -> None:
        if self._agent is None:
            return
        (pid, pidfd), self._agent = self._agent, None
        self._close(pidfd)
        if self._agent_stat is not None:
            self._agent_stat.close()
        self._report_failure(pid, Weight.OWN, descriptions.agent_gone(pid, self._court.host))

    def _close(self, pidfd: int) -> None:
        self._loop.forget(pidfd)
        os.close(pidfd)

    def _report_failure(self, pid: int, weight: Weight, cause: str) -> None:
        # Before all members of the same moment, whose ancestors they are.
        host = self._court.host
        self._court.report_failure(FailureReport(f"{host} {pid} end", weight, cause, None, host, order=-1))
