"""The processes above a watcher: the rank that started it, and the torchrun agent above that."""

import contextlib
import os

from spmd_serve.liveness import descriptions
from spmd_serve.liveness.decision import RootCauseDecision
from spmd_serve.liveness.event_loop import Loop
from spmd_serve.liveness.members import Members
from spmd_serve.liveness.procfs import ProcFile
from spmd_serve.liveness.root_cause import FailureReport, Weight
from spmd_serve.liveness.state import WatcherState


class Ancestors:
    """Watches both processes by pidfd; neither needs to be registered."""

    def __init__(
        self,
        state: WatcherState,
        decision: RootCauseDecision,
        members: Members,
        loop: Loop,
        parent: tuple[int, int],
        agent: tuple[int, int] | None,
    ) -> None:
        """`parent`, `agent`: pid and pidfd."""
        self._state = state
        self._decision = decision
        self._members = members
        self._loop = loop
        self._parent = parent[0]
        self._parent_alive = True
        self._agent = agent
        self._agent_stat: ProcFile | None = None
        loop.watch_end(parent[1], lambda _events: self._on_parent_gone(parent[1]))
        if agent is not None:
            loop.watch_end(agent[1], lambda _events: self._on_agent_gone())
            with contextlib.suppress(OSError):  # gone already, which the pidfd reports
                self._agent_stat = ProcFile(agent[0])

    @property
    def parent_may_register(self) -> bool:
        """Whether the first member is still to come."""
        return self._parent_alive and not self._parent_is_registered

    @property
    def _parent_is_registered(self) -> bool:
        return any(member.pid == self._parent for member in self._members.all)

    def check_agent(self) -> None:
        """Check at a member's death whether the agent, whose last thread may still run, is its cause."""
        if self._agent is not None and self._agent_stat is not None:
            look = self._agent_stat.read()
            if look is None or look.dying:
                self._on_agent_gone()

    def _on_parent_gone(self, pidfd: int) -> None:
        self._close(pidfd)
        self._parent_alive = False
        self._members.stop_registration()
        if self._members.alive and not self._parent_is_registered:
            who = descriptions.member("local rank 0", self._parent, self._state.hostname)
            self._report(self._parent, Weight.UNEXPLAINED, descriptions.ended(who, None, False))

    def _on_agent_gone(self) -> None:
        if self._agent is None:
            return
        (pid, pidfd), self._agent = self._agent, None
        self._close(pidfd)
        if self._agent_stat is not None:
            self._agent_stat.close()
        self._report(pid, Weight.OWN, descriptions.agent_gone(pid, self._state.hostname))

    def _close(self, pidfd: int) -> None:
        self._loop.forget(pidfd)
        os.close(pidfd)

    def _report(self, pid: int, weight: Weight, cause: str) -> None:
        # Before all members of the same moment, whose ancestors these processes are.
        hostname = self._state.hostname
        failure = FailureReport(f"{hostname} {pid} end", weight, cause, None, hostname, order=-1)
        self._decision.report_failure(failure)
