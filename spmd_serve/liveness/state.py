"""What all parts of a watcher read: its clock, its hostname, its configuration and its limits."""

import socket
from collections.abc import Sequence

from spmd_serve.liveness import descriptions
from spmd_serve.liveness.hang import Limits
from spmd_serve.liveness.protocol import WatchConfig, beat_s
from spmd_serve.liveness.root_cause import PauseTolerantClock
from spmd_serve.wire.lines import Message


class WatcherState:
    """The clock counts seconds; the configuration is None until the rendezvous has taken place."""

    def __init__(self, rank_timeout: float, grace_s: float) -> None:
        """`grace_s`: seconds that a member may take to end after the root cause was declared."""
        self.clock = PauseTolerantClock(0.0)
        self.hostname = socket.gethostname()
        self.config: WatchConfig | None = None
        self.grace_s = grace_s
        self.set_limits(Limits(rank_timeout, float("inf"), expect_turns=False))

    def configure(self, config: WatchConfig) -> None:
        """Apply what the rendezvous has found."""
        self.config = config
        self.hostname = self.hostnames[config.node]
        self.grace_s = config.grace_s
        self.set_limits(Limits(config.rank_timeout, config.step_timeout, config.expect_turns))

    def set_limits(self, limits: Limits) -> None:
        """Apply other limits, and the intervals that follow from them."""
        self.limits = limits
        self.beat_s = beat_s(limits.rank_timeout)
        self.clock.most = 2 * limits.look_s

    @property
    def now(self) -> float:
        """The time of the watcher's own clock, seconds."""
        return self.clock.now

    @property
    def node(self) -> int:
        """The number of this node."""
        return 0 if self.config is None else self.config.node

    @property
    def hostnames(self) -> Sequence[str]:
        """The hostname of each node; before the rendezvous, of this one."""
        return (self.hostname,) if self.config is None else self.config.hostnames

    @property
    def ranks(self) -> Sequence[Sequence[int]]:
        """The global ranks of each node."""
        return ((),) if self.config is None else self.config.ranks

    def hostname_of(self, rank: int) -> str:
        """Return the hostname of a rank's node."""
        found = (name for name, ranks in zip(self.hostnames, self.ranks, strict=True) if rank in ranks)
        return next(found, self.hostname)

    def describe(self, node: int) -> str:
        """Return a node for messages: "node b (ranks 4-7)"."""
        return descriptions.node(self.hostnames[node], self.ranks[node])

    def only_rank(self, node: int) -> int | None:
        """Return the rank of a node that has one rank, else None."""
        ranks = self.ranks[node]
        return ranks[0] if len(ranks) == 1 else None

    def rules(self) -> Message:
        """Return what members must know of the limits."""
        return {
            "t": "watch",
            "hostname": self.hostname,
            "rank_timeout": self.limits.rank_timeout,
            "grace_s": self.grace_s,
        }
