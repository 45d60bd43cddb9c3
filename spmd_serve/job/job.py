"""The job as one rank sees it: its watcher, its membership, its votes, and its end."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, Self

from spmd_serve.config.flags import Flags
from spmd_serve.errors import ExitCode, PeerLost, SpmdError, is_of_a_peer, missing_package
from spmd_serve.job.state import JobEvent, JobLife
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
"""Seconds that a process may take to end after the root cause is declared; the watcher then kills it."""
REPORT_S = 1.2
"""Seconds that a rank with a child stays after the root cause: its API server answers clients meanwhile."""
END_S = 5.0
"""Seconds that a rank may still be busy after the job's normal end is announced."""
LINGER_S = 1.0
"""Seconds that a rank of an elastic job waits for its own signal after the job's normal end."""


class Job:
    """The job as this rank sees it. `enter` creates it, and returns when all ranks have joined.

    `life` holds its state. When another process of the job fails or the job ends, a thread of the watcher's
    link applies the event to `life` and ends this process.
    """

    as_torchrun = False
    """Whether ranks keep torchrun's numbers, on whichever node the head is."""
    stop_error: SpmdError | None = None
    """The error to report, with its exit code, if the job is asked to end before it serves; None: exit 0."""
    end_code: int | None = None
    """The exit code with which the job's end was announced to all ranks; None: no end is announced."""

    def __init__(self, flags: Flags, env: TorchrunEnv) -> None:
        self.flags = flags
        self.env = env
        self.own_cores: list[int] = []
        self.life = JobLife()
        self.part = (0, 1)
        """Number of this rank's endpoint, and number of endpoints. The job ends with the last endpoint."""
        self._on_drain: Callable[[str], None] | None = None
        self._drain_asked: str | None = None
        self._before_exit: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._signals = 0
        self._signalled = threading.Event()
        self._least_nodes, self.most_nodes = node_range(env.agent_pid) or (1, 1)
        self.watcher: str
        self.link: WatcherLink
        self.membership: Membership

    @classmethod
    def enter(cls, flags: Flags) -> Self:
        """Start or find the watcher, then join all ranks. Raises SpmdError, one line, if that fails."""
        env = TorchrunEnv.read(os.environ)
        job = cls(flags, env)
        if env.launched:
            die_with_parent(env.agent_pid)
        die_with_parent_in_children()
        # Before torch is imported: OpenMP reads its variables then, and the watcher stays small.
        job.own_cores = cores.prepare_environ(env, os.environ)
        job._open_watcher()
        on_ending_signal(job._on_ending_signal)
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
            self.watcher, hello, WATCHER_TIMEOUT_S, self._on_root_cause, self._on_drain_request, self._on_end
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
        self.life.apply(JobEvent.JOINED)
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
        """Whether the loop of an idle rank must make progress with each heartbeat."""
        return self.flags.control_backend != "nccl"

    def key(self) -> str | None:
        """Return the shared secret of ``--control-key-file`` in hexadecimal, or None without that flag."""
        path = self.flags.control_key_file
        if path is None:
            return None
        from spmd_serve.config.job_spec import read_key

        return read_key(path).hex()

    def says_that_it_serves(self) -> None:
        """Tell the watcher that this rank's endpoint accepts requests."""
        part, of = self.part
        self.link.serving(part, of)

    def say(self, text: str) -> None:
        """Log one line, from the first rank of each node."""
        if self.env.local_rank == 0:
            log.say(f"spmd_serve: {text}")

    def vote(self, what: str, problem: SpmdError | None, timeout_s: float | None = None) -> None:
        """Return if `what` succeeded on all ranks, else raise the same SpmdError on all (see `vote.vote`).

        `timeout_s`: seconds to wait for the other ranks; None: ``--join-timeout``.
        """
        from spmd_serve.rendezvous.vote import vote

        membership, patience_s = self.membership, self.flags.join_timeout if timeout_s is None else timeout_s
        vote(membership.store, membership.me, membership.cluster, what, problem, patience_s, self.say)

    @contextmanager
    def voting(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        """Vote on the block: an SpmdError in it is raised on all ranks. `timeout_s`: see `vote`."""
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
        """Report an error that leaves the block to the watcher, as a failure of this rank."""
        try:
            yield
        except SpmdError as problem:
            self._exit_if_ended(problem)
            self.link.failed(str(problem), peer=is_of_a_peer(problem))
            raise
        except Exception as problem:
            self._exit_if_ended(problem)
            missing = missing_package(problem)
            if missing is not None:
                self.link.failed(str(missing))
                raise missing from problem
            text = " ".join(str(problem).split())
            self.link.failed(f"{type(problem).__name__}: {text}", peer=is_of_a_peer(problem))
            raise

    def _exit_if_ended(self, problem: Exception) -> None:
        """Exit normally if the job has ended: a missing peer has then only exited earlier."""
        if self.life.has_seen(JobEvent.END_ANNOUNCED) and is_of_a_peer(problem):
            self._exit_after_end()

    def drain_with(self, on_drain: Callable[[str], None]) -> None:
        """Call `on_drain(reason)` when the job is asked to end; at once, if that has happened already."""
        with self._lock:
            self._on_drain = on_drain
            asked = self._drain_asked
        if asked is not None:
            on_drain(asked)

    def before_exit(self, call: Callable[[], object]) -> None:
        """Set the call, of at most `REPORT_S` seconds, that precedes the exit after a root cause."""
        self._before_exit = call

    # Events from signals and from the watcher. Each method runs in a thread of its sender.

    def _on_ending_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        self._signalled.set()
        if self._signals > 1:
            log.say(f"spmd_serve: second {number.name}: ends at once")
            self.link.failed(f"ended at once by a second {number.name}")
            os._exit(ExitCode.FAILED)
        self.link.request_drain(f"{number.name} at torchrun rank {self.env.rank} on {host_name()}")

    def _on_drain_request(self, reason: str) -> None:
        self.say(f"{reason}: the job finishes what it does and ends")
        with self._lock:
            self.life.apply(JobEvent.DRAIN_REQUESTED)
            self._drain_asked = reason
            on_drain = self._on_drain
        if on_drain is not None:
            on_drain(reason)
        elif not self.life.has_seen(JobEvent.JOINED) or self.membership.me.rank == 0:
            # Nothing is served yet, so there is nothing to wait for.
            threading.Thread(target=self._end_before_serving, name="end-before-serving", daemon=True).start()

    def _end_before_serving(self) -> None:
        """Announce the end of a job that has no child yet, and exit."""
        if self.end_code is None:
            self.end_code = ExitCode.OK if self.stop_error is None else self.stop_error.exit_code
        self.link.announce_end(End(code=self.end_code, unserved=not self.life.has_seen(JobEvent.LOADED)))
        self._exit_after_end()

    def _on_end(self, end: End) -> None:
        self.end_code = end.code
        self.life.apply(JobEvent.END_ANNOUNCED)
        if end.unserved or not self.life.has_seen(JobEvent.LOADED):
            self._exit_after_end()
        timer = threading.Timer(END_S, os._exit, (self.exit_code(end.code),))
        timer.daemon = True
        timer.start()

    def exit_code(self, code: int) -> int:
        """Return the exit code that torchrun sees if the job's end was announced with `code`."""
        return code

    def _exit_after_end(self) -> NoReturn:
        """Exit with the code of the announced end, from any thread, whatever the main thread is doing."""
        self._wait_for_own_signal()
        with self._lock:  # a second thread that comes here waits until the first one exits
            code = self.end_code or ExitCode.OK
            if self.stop_error is not None and code == self.stop_error.exit_code:
                if self._on_drain is None:  # else the child has logged it
                    self.say(str(self.stop_error))
                report(self.stop_error, quiet=True)
            os._exit(self.exit_code(code))

    def leave_together(self, timeout_s: float) -> int:
        """After the driver's stop message, wait for the end of the whole job, and return its exit code.

        All ranks exit together because a torchrun agent whose ranks have exited waits for the other agents
        for at most 300 s. Raises PeerLost after `timeout_s` seconds.
        """
        self.link.leaving()
        if not self.life.wait_for(JobEvent.END_ANNOUNCED, timeout_s):
            raise PeerLost(
                f"the job's end was not announced within {timeout_s:.0f} s after its driver's stop"
            )
        self._wait_for_own_signal()
        return self.end_code or ExitCode.OK

    def announce_end(self, code: int) -> None:
        """Announce that this rank's endpoint has ended with `code`; the other endpoints then end as well.

        After the last endpoint all ranks exit with the same `code`: an agent whose ranks exit with 0 would
        wait 300 s for an agent whose ranks do not.
        """
        part, of = self.part
        if of > 1:
            self.link.request_drain(f"the endpoint of {self.membership.me} has ended")
        self.link.announce_end(End(part, of, code))
        self._wait_for_own_signal()

    def _wait_for_own_signal(self) -> None:
        """In an elastic job, wait up to `LINGER_S` for the signal of this rank's own agent.

        When a node joins, each agent signals its ranks as soon as it learns of the node, and the first signal
        drains the whole job. An agent whose ranks exit with 0 before it signals them considers the job done.
        """
        if self.most_nodes > self._least_nodes:
            self._signalled.wait(LINGER_S)

    def _on_root_cause(self, root_cause: RootCause) -> None:
        self.life.apply(JobEvent.FAILURE_DECLARED)
        if self._before_exit is not None:
            self._before_exit()
        # The watcher prints the cause, as the last line of the node, when its members are gone.
        alone = self.link.watcher_lost and self.env.local_rank == 0
        report(PeerLost(root_cause.cause), quiet=not alone)
        os._exit(ExitCode.FAILED)


def device_name(local_rank: int) -> str:
    """Return this rank's torch device. CUDA stays uninitialized, because children are forked later."""
    import torch

    if torch.version.cuda is not None and os.path.exists("/dev/nvidiactl"):
        return f"cuda:{local_rank}"
    if torch.version.hip is not None and os.path.exists("/dev/kfd"):
        return f"cuda:{local_rank}"
    return "cpu"


def use_interface(interface: str, address: str) -> None:
    """Make vLLM's process groups use the interface of the rendezvous, unless the user has set another one."""
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ.setdefault("VLLM_HOST_IP", address)
