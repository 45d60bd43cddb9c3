"""Sentences that describe failures: which process or node, how it failed, and why. Pure."""

import signal
from collections.abc import Sequence

from spmd_serve.system.process import Ending
from spmd_serve.topology import spans


def seconds(value: float) -> str:
    """Format a duration: "10 s", "1.5 s"."""
    return f"{value:.1f} s" if value < 9.95 and f"{value:.1f}"[-1] != "0" else f"{value:.0f} s"


def node(hostname: str, ranks: Sequence[int]) -> str:
    """Name a node and its ranks: "node b (ranks 4-7)"."""
    return f"node {hostname} ({spans('rank', ranks)})" if ranks else f"node {hostname}"


def member(name: str, pid: int, hostname: str) -> str:
    """Name one process of the job: "rank 3 (pid 123, node b)"."""
    return f"{name} (pid {pid}, node {hostname})"


def ended(process: str, ending: Ending | None, out_of_memory: bool) -> str:
    """Describe an unexplained exit. `out_of_memory`: the OOM killer's counter has risen on that node."""
    if ending is None:
        how = "was killed or crashed without reporting an error"
    elif ending.signal is not None:
        how = f"was killed by {_signal_name(ending.signal)}"
    else:
        how = f"ended with exit code {ending.code} and reported no error"
    return f"{process} {how}" + ("; the kernel's OOM killer was active on that node" if out_of_memory else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def own_report(process: str, cause: str) -> str:
    """Return a member's own error report as one line."""
    return f"{process}: {' '.join(cause.split())}"


def stopped(process: str, for_s: float) -> str:
    """Describe a member in state T."""
    return f"{process} has been stopped (SIGSTOP) for {seconds(for_s)}"


def stuck(process: str, step: int, for_s: float) -> str:
    """Describe a step in flight without progress."""
    return (
        f"{process} hung: step {step} has made no progress for {seconds(for_s)} "
        "(every rank was asked to write its stacks to its log)"
    )


def idle(process: str, for_s: float) -> str:
    """Describe a rank that receives heartbeats but whose loop does not handle them."""
    return (
        f"{process} hung: its loop has not turned for {seconds(for_s)}, although the driver sends heartbeats"
    )


def silent(process: str, for_s: float) -> str:
    """Describe a driver that sends no heartbeats any more."""
    return f"{process} hung: it has sent no heartbeat for {seconds(for_s)}"


def stalled(process: str, for_s: float) -> str:
    """Describe a driver that has work but makes no progress, while no rank runs a step as old."""
    return f"{process} hung: its loop has made no progress for {seconds(for_s)}, and no step has run as long"


def owes_reply(rank: int, hostname: str, driver: str, for_s: float) -> str:
    """Describe a rank without an old step, whose driver waits for its reply."""
    return (
        f"rank {rank} (node {hostname}) hung: {driver} has waited {seconds(for_s)} for its reply, "
        "and no step has run as long"
    )


def node_silent(node: str, for_s: float) -> str:
    """Describe a node from which nothing arrives any more."""
    return (
        f"{node} has been silent for {seconds(for_s)}: "
        "its machine, its network link or its watcher is gone or has stopped"
    )


def node_lost(node: str, silent_s: float, rank_timeout: float) -> str:
    """Describe a node whose watcher has closed its connection without announcing its end.

    If it was silent before, that is the reason: members kill a watcher that is stopped.
    """
    if silent_s > rank_timeout / 2:
        return node_silent(node, silent_s)
    return f"{node}: its watcher is gone (killed, or the machine went down)"


def agent_gone(pid: int, hostname: str) -> str:
    """Describe the loss of the torchrun agent, the parent of the ranks."""
    return f"torchrun's agent (pid {pid}) on node {hostname} is gone"


def not_joined(node: str, limit_s: float) -> str:
    """Describe a node whose watcher has never connected to the head's."""
    return (
        f"{node}: its watcher has not connected within {seconds(limit_s)} after the rendezvous: "
        "did the machine go down, or does a firewall between the nodes block TCP to the head?"
    )


def head_unreachable(node: str, head: str, address: str, port: int, limit_s: float, reason: str) -> str:
    """Describe a watcher that could not connect to the head's, or was refused by it."""
    return (
        f"the watcher of {node} could not join that of the head {head} at {address} port {port} "
        f"within {seconds(limit_s)}: {reason}"
    )
