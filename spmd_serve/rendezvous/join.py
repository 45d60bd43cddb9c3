"""A seat in this round of the job, on torchrun's own store (the handshake: handshake.py)."""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from spmd_serve.errors import PeerLost, UsageError
from spmd_serve.rendezvous.handshake import Handshake, leave_together
from spmd_serve.rendezvous.rank_assignment import Arrival
from spmd_serve.rendezvous.store import Say, Wait, get_json, put_json, wait_keys
from spmd_serve.system import network
from spmd_serve.system.cores import format_cpus
from spmd_serve.system.network import Route
from spmd_serve.system.torchrun_env import TorchrunEnv, rendezvous_host
from spmd_serve.topology import Cluster, RankInfo

__all__ = ["Membership", "connect_store", "get_json", "join_round", "leave_together", "put_json", "wait_keys"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REACH_S = 30.0
_CALL_S = 300.0


@dataclass
class Membership:
    """A process's seat in the run."""

    store: TorchStore
    """This run's part of the store."""
    host: str
    """Numeric address of the store, with `port`, for clients of child processes (connect_store)."""
    port: int
    round_id: str
    """The run's generation: part of every name that must not meet that of an earlier round."""
    cluster: Cluster
    me: RankInfo


def join_round(
    env: TorchrunEnv,
    route: Route,
    *,
    head: str | None,
    timeout_s: float,
    device: str,
    say: Say,
    cpus: Sequence[int] | None = None,
    endpoint: str | None = None,
    as_torchrun: bool = False,
) -> Membership:
    """Meet the other ranks of this round; all of them get the same nonce and the same Cluster.

    `head` names the node that gets rank 0 (default: the one that owns the rendezvous endpoint, which is
    `endpoint` or what torchrun was given); `cpus` are those that the process may use (default: its affinity
    now). With `as_torchrun` ranks keep torchrun's numbers instead. After `timeout_s` seconds UsageError names
    the torchrun ranks that have not come, and where the others are. An unknown `head`, and a node that others
    would reach by loopback, is a UsageError with the same text on every rank. PeerLost when the store or this
    rank's torchrun agent is gone.
    """
    deadline = time.monotonic() + timeout_s
    raw, host = _open(env, deadline, say)
    cpus = sorted(os.sched_getaffinity(0)) if cpus is None else cpus
    given = endpoint or (rendezvous_host(env.agent_pid) if env.launched else None)
    hello = _hello(env, route, device, cpus, given or env.master_addr)
    store = PrefixStore(f"spmd_serve/join/{env.run_id}/{env.world_size}", raw)
    handshake = Handshake(store, env, hello, deadline, say)
    round_id, cluster = handshake.lead(head, as_torchrun) if env.rank == 0 else handshake.follow()
    me = next(info for info in cluster.ranks if info.torchrun_rank == env.rank)
    return Membership(_of_run(raw, round_id), host, raw.port, round_id, cluster, me)


def connect_store(host: str, port: int, round_id: str, timeout_s: float) -> TorchStore:
    """Own client of a run's part of the store, for a child process; PeerLost when it can't be reached."""
    try:
        return _of_run(_client(host, port, timeout_s), round_id)
    except RuntimeError as error:
        raise PeerLost(
            f"process {os.getpid()} can't reach torchrun's store at {host}:{port}: {error}"
        ) from error


def _of_run(raw: TorchStore, round_id: str) -> TorchStore:
    return PrefixStore(f"spmd_serve/{round_id}", raw)


def _client(host: str, port: int, timeout_s: float) -> TCPStore:
    store = TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(timeout_s, 1.0))
    )
    store.set_timeout(timedelta(seconds=_CALL_S))
    return store


def _open(env: TorchrunEnv, deadline: float, say: Say) -> tuple[TCPStore, str]:
    """The store of this job, and the numeric address that reaches it."""
    if not env.launched:
        # Without torchrun: an own one, which nobody outside this host can reach.
        listener = network.free_listener(env.master_addr)
        port = listener.getsockname()[1]
        own = TCPStore(
            env.master_addr, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return own, env.master_addr
    served = _serve(env) if not env.agent_store and env.rank == 0 else None
    host = _reach(env, deadline, say)
    if served is not None:
        return served, host
    try:
        return _client(host, env.master_port, deadline - time.monotonic()), host
    except RuntimeError as error:
        raise _unreachable(env, str(error).splitlines()[0]) from error


def _serve(env: TorchrunEnv) -> TCPStore:
    # Some backends (etcd; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) only choose an address and a port for rank 0.
    try:
        return TCPStore("localhost", env.master_port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise UsageError(
            f"torchrun rank 0 on {socket.gethostname()} can't serve the store on "
            f"MASTER_PORT={env.master_port} ({str(error).splitlines()[0]}): another process has taken the "
            "port; start again"
        ) from error


def _reach(env: TorchrunEnv, deadline: float, say: Say) -> str:
    """Wait until the store accepts a connection: torch's own client would fill the log with stack traces."""
    if env.agent_store:
        # The agent serves its store before it starts any rank, so there is no sense in waiting for long.
        deadline = min(deadline, time.monotonic() + _REACH_S)
    wait = Wait(say, deadline)
    while True:
        reason = "the name does not resolve"
        for address in network.resolve(env.master_addr):
            try:
                seconds = min(max(wait.left, 0.1), 3.0)
                socket.create_connection((address, env.master_port), timeout=seconds).close()
                return address
            except OSError as error:
                reason = f"{address}: {error.strerror or error}"
        if wait.left <= 0:
            raise _unreachable(env, reason)
        what = f"torchrun's store at {env.master_addr}:{env.master_port} ({reason})"
        wait.pause(partial(str, what))


def _unreachable(env: TorchrunEnv, reason: str) -> UsageError:
    return UsageError(
        f"torchrun rank {env.rank} on {socket.gethostname()} can't reach torchrun's store at "
        f"{env.master_addr}:{env.master_port} (MASTER_ADDR, MASTER_PORT; {reason}): check that no firewall "
        "closes the ports between the nodes and that the name means the same address on all of them, or "
        "start torchrun with --local-addr=<own address> on every node and an address as --rdzv-endpoint"
    )


def _hello(env: TorchrunEnv, route: Route, device: str, cpus: Sequence[int], endpoint: str) -> Arrival:
    return Arrival(
        token=secrets.token_hex(8),
        torchrun_rank=env.rank,
        local_rank=env.local_rank,
        group_rank=env.group_rank,
        names=tuple(network.own_names()),
        addresses=tuple(network.own_addresses().items()),
        route=route,
        pid=os.getpid(),
        machine_id=_BOOT_ID.read_text().strip(),
        device=device,
        cpus=format_cpus(cpus),
        endpoint=endpoint,
        endpoint_addresses=tuple(network.resolve(endpoint)),
        master_addresses=tuple(network.resolve(env.master_addr)),
    )
