"""This rank's place in the job: its host's watcher, its seat at the rendezvous, its votes with the others."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, Self

from spmd_serve.config.flags import Flags
from spmd_serve.errors import ExitCode, PeerLost, SpmdError, is_of_a_peer, missing_package
from spmd_serve.liveness import End, RootCause, WatchConfig, WatcherLink, start_watcher, watcher_address
from spmd_serve.liveness.cleanup import use_scratch
from spmd_serve.system import cores, log, network
from spmd_serve.system.network import host_name
from spmd_serve.system.process import die_with_parent, die_with_parent_in_children
from spmd_serve.system.report import report
from spmd_serve.system.signals import on_ending_signal
from spmd_serve.system.torchrun_env import TorchrunEnv, node_range

if TYPE_CHECKING:
    from spmd_serve.rendezvous.join import Membership

WATCHER_TIMEOUT_S = 30.0
GRACE_S = 2.0
"""How long a process may take to end by itself after the verdict; the watcher then kills it."""
REPORT_S = 1.2
"""How long a rank with a child stays after the verdict: the API server, which dies with it, tells clients."""
END_S = 5.0
"""How long a rank may still be busy once the job's normal end is announced."""
LINGER_S = 1.0
"""How long a rank of an elastic job that was not signalled itself stays after the job's normal end."""


class Job:
    """The job as this rank sees it; made by `enter`, which returns when all ranks have met.

    Whatever happens to another process of the job ends this one too, from a thread of the watcher's link.
    """

    as_torchrun = False
    """Whether ranks keep torchrun's numbers, wherever the head is."""
    early_end: SpmdError | None = None
    """What is said, and whose exit code it is, when the job ends as asked before it serves; None: code 0."""
    end_code: int | None = None
    """What the announced end, which all ranks hear of, was announced with."""

    def __init__(self, flags: Flags, env: TorchrunEnv) -> None:
        self.flags = flags
        self.env = env
        self.own_cores: list[int] = []
        self.serving = False
        """From when on the driver's stop message, not the announced end, ends this rank."""
        self.part = (0, 1)
        """Which of how many endpoints this rank has opened: the job ends with the last of them."""
        self._ended = threading.Event()
        self._on_drain: Callable[[str], None] | None = None
        self._drain_asked: str | None = None
        self._before_exit: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._signals = 0
        self._has_met = False
        self._signalled = threading.Event()
        self._least_nodes, self.most_nodes = node_range(env.agent_pid) or (1, 1)
        self.watcher: str
        self.link: WatcherLink
        self.membership: Membership

    @classmethod
    def enter(cls, flags: Flags) -> Self:
        """Start or find the watcher, then meet all ranks. Raises SpmdError, one line, when that fails."""
        env = TorchrunEnv.read(os.environ)
        job = cls(flags, env)
        if env.launched:
            die_with_parent(env.agent_pid)
        die_with_parent_in_children()
        # Before torch is imported: OpenMP reads its variables then, and the watcher stays small.
        job.own_cores = cores.prepare_environ(env, os.environ)
        job._open_watcher()
        on_ending_signal(job._ending_signal)
        with job.reported():
            job._join()
        return job

    def _open_watcher(self) -> None:
        env = self.env
        # Without torchrun the parent may be a shell that has started other servers too.
        anchor = env.agent_pid if env.launched else os.getpid()
        if env.local_rank == 0:
            self.watcher = start_watcher(
                anchor,
                env.restart_count,
                watch_agent=env.launched,
                rank_timeout=self.flags.rank_timeout,
                grace_s=GRACE_S,
            )
        else:
            self.watcher = watcher_address(anchor, env.restart_count)
        use_scratch(self.watcher, os.environ)
        hello = {"kind": "rank", "name": f"torchrun rank {env.rank}", "rank": None}
        self.link = WatcherLink.connect(
            self.watcher, hello, WATCHER_TIMEOUT_S, self._root_cause, self._drain, self._end
        )

    def _join(self) -> None:
        from spmd_serve.rendezvous.join import get_json, join_round, put_json

        env, flags = self.env, self.flags
        if self.most_nodes > self._least_nodes and env.agent_store:
            self.say(
                "warning: no node can join this job later, nor take a lost one's place: start torchrun with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
            )
        route = network.choose_route(env.master_addr, env.master_port, flags.interface, os.environ)
        self.membership = join_round(
            env,
            route,
            head=flags.head,
            timeout_s=flags.join_timeout,
            device=device_name(env.local_rank),
            say=self.say,
            as_torchrun=self.as_torchrun,
        )
        self._has_met = True
        me, store, cluster = self.membership.me, self.membership.store, self.membership.cluster
        self.link.identify(f"rank {me.rank}", me.rank)
        if me.local_rank == 0:
            if me.rank == 0:
                address = me.address
                put_json(store, "watch", [address, self.link.listen(address)])
            address, port = get_json(
                store, "watch", flags.join_timeout, "the watcher's address", "rank 0", self.say
            )
            self.link.configure(
                WatchConfig(
                    node=me.node,
                    hostnames=tuple(cluster.hostnames),
                    ranks=tuple(tuple(info.rank for info in node) for node in cluster.nodes),
                    head_address=address,
                    head_port=port,
                    round_id=self.membership.round_id,
                    rank_timeout=flags.rank_timeout,
                    step_timeout=flags.step_timeout,
                    join_timeout=flags.join_timeout,
                    grace_s=GRACE_S,
                    expect_turns=self.expects_turns,
                    key=self.key(),
                )
            )
        if len(cluster.nodes) > 1:
            use_interface(me.interface, me.address)

    @property
    def expects_turns(self) -> bool:
        """Whether an idle rank's loop must turn with each heartbeat."""
        return self.flags.control_backend != "nccl"

    def key(self) -> str | None:
        """The shared secret of ``--control-key-file``."""
        path = self.flags.control_key_file
        if path is None:
            return None
        from spmd_serve.config.job_spec import read_key

        return read_key(path).hex()

    def says_that_it_serves(self) -> None:
        """This rank's endpoint takes requests from now on."""
        part, of = self.part
        self.link.serving(part, of)

    def say(self, text: str) -> None:
        """A line to the log, from one rank of each host."""
        if self.env.local_rank == 0:
            log.say(f"spmd_serve: {text}")

    def vote(self, what: str, problem: SpmdError | None, timeout_s: float | None = None) -> None:
        """See `votes.vote`: returns when `what` went well on all ranks, else raises the same on all.

        `timeout_s`: seconds to wait for the others (``--join-timeout`` unless given).
        """
        from spmd_serve.rendezvous.vote import vote

        membership, patience_s = self.membership, self.flags.join_timeout if timeout_s is None else timeout_s
        vote(membership.store, membership.me, membership.cluster, what, problem, patience_s, self.say)

    @contextmanager
    def voting(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        """Vote on the block: its SpmdError becomes everybody's. `timeout_s`: see `vote`."""
        problem: SpmdError | None = None
        try:
            yield
        except SpmdError as error:
            problem = error
        except ImportError as error:
            problem = missing_package(error)
            if problem is None:
                raise
        self.vote(what, problem, timeout_s)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Tell the watcher of an error that leaves the block, as this rank's own."""
        try:
            yield
        except SpmdError as problem:
            self._leave_if_ended(problem)
            self.link.failed(str(problem), peer=is_of_a_peer(problem))
            raise
        except Exception as problem:
            self._leave_if_ended(problem)
            missing = missing_package(problem)
            if missing is not None:
                self.link.failed(str(missing))
                raise missing from problem
            text = " ".join(str(problem).split())
            self.link.failed(f"{type(problem).__name__}: {text}", peer=is_of_a_peer(problem))
            raise

    def _leave_if_ended(self, problem: Exception) -> None:
        """After the announced end, a peer that is gone has only left earlier."""
        if self._ended.is_set() and is_of_a_peer(problem):
            self._leave()

    def drain_with(self, on_drain: Callable[[str], None]) -> None:
        """What to do when somebody asks the job to finish; at once, if that happened already."""
        with self._lock:
            self._on_drain = on_drain
            asked = self._drain_asked
        if asked is not None:
            on_drain(asked)

    def before_exit(self, call: Callable[[], object]) -> None:
        """What to do, within `REPORT_S`, before a verdict ends this process."""
        self._before_exit = call

    # What comes from elsewhere, in threads.

    def _ending_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        self._signalled.set()
        if self._signals > 1:
            log.say(f"spmd_serve: second {number.name}: ends at once")
            self.link.failed(f"ended at once by a second {number.name}")
            os._exit(ExitCode.FAILED)
        self.link.request_drain(f"{number.name} at torchrun rank {self.env.rank} on {host_name()}")

    def _drain(self, reason: str) -> None:
        self.say(f"{reason}: the job finishes what it does and ends")
        with self._lock:
            self._drain_asked = reason
            on_drain = self._on_drain
        if on_drain is not None:
            on_drain(reason)
        elif not self._has_met or self.membership.me.rank == 0:
            # Nothing is served yet: there is nothing to wait for.
            threading.Thread(target=self._end_early, name="end-early", daemon=True).start()

    def _end_early(self) -> None:
        if self.end_code is None:
            self.end_code = ExitCode.OK if self.early_end is None else self.early_end.exit_code
        self.link.announce_end(End(code=self.end_code, early=not self.serving))
        self._leave()

    def _end(self, end: End) -> None:
        self.end_code = end.code
        self._ended.set()
        if end.early or not self.serving:
            self._leave()
        timer = threading.Timer(END_S, os._exit, (self.exit_code(end.code),))
        timer.daemon = True
        timer.start()

    def exit_code(self, code: int) -> int:
        """What ranks end with, for `torchrun` to see, where the job's end was announced with `code`."""
        return code

    def _leave(self) -> NoReturn:
        """End after the job's end, wherever this process is."""
        self._linger()
        with self._lock:  # a second thread may come here: it waits for the end
            code = self.end_code or ExitCode.OK
            if self.early_end is not None and code == self.early_end.exit_code:
                if self._on_drain is None:  # else the child has said it
                    self.say(str(self.early_end))
                report(self.early_end, quiet=True)
            os._exit(self.exit_code(code))

    def leave_together(self, timeout_s: float) -> int:
        """After this rank's driver has said stop: wait for the end of the whole job; its code.

        A torchrun agent whose ranks leave early waits for the others, and then for no longer than 300 s.
        Raises PeerLost after `timeout_s` seconds.
        """
        self.link.leaving()
        if not self._ended.wait(timeout_s):
            raise PeerLost(
                f"the job's end was not announced within {timeout_s:.0f} s after its driver's stop"
            )
        self._linger()
        return self.end_code or ExitCode.OK

    def announce_end(self, code: int) -> None:
        """On a rank that has opened an endpoint, when nothing is left to do there; others then end as well.

        When this is the last of them, all ranks may leave, with the same `code`: an agent whose ranks end
        with 0 would wait 300 s for one whose ranks don't.
        """
        part, of = self.part
        if of > 1:
            self.link.request_drain(f"the endpoint of {self.membership.me} has ended")
        self.link.announce_end(End(part, of, code))
        self._linger()

    def _linger(self) -> None:
        """Stay until this rank's own agent has signalled it, in case that it is about to.

        When a node joins, each agent signals its ranks as soon as it hears of the node, and the first one's
        signal drains all. An agent that saw its ranks end with code 0 before would take the job for done.
        """
        if self.most_nodes > self._least_nodes:
            self._signalled.wait(LINGER_S)

    def _root_cause(self, root_cause: RootCause) -> None:
        if self._before_exit is not None:
            self._before_exit()
        # The watcher prints the cause, as the host's last line, when its members are gone.
        alone = self.link.watcher_lost and self.env.local_rank == 0
        report(PeerLost(root_cause.cause), quiet=not alone)
        os._exit(ExitCode.FAILED)


def device_name(local_rank: int) -> str:
    """What this rank computes on, without touching CUDA (children are still to be forked)."""
    import torch

    if torch.version.cuda is not None and os.path.exists("/dev/nvidiactl"):
        return f"cuda:{local_rank}"
    if torch.version.hip is not None and os.path.exists("/dev/kfd"):
        return f"cuda:{local_rank}"
    return "cpu"


def use_interface(interface: str, address: str) -> None:
    """Have the groups that vLLM makes use the interface that the rendezvous found; a user's setting stays."""
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ.setdefault("VLLM_HOST_IP", address)
