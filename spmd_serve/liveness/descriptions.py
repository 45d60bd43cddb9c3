"""The sentences that name who is gone, where and why. Pure."""

import signal
from collections.abc import Sequence

from spmd_serve.system.process import Ending


def seconds(value: float) -> str:
    """A duration for people: "10 s", "1.5 s"."""
    return f"{value:.1f} s" if value < 9.95 and f"{value:.1f}"[-1] != "0" else f"{value:.0f} s"


def ranks(numbers: Sequence[int]) -> str:
    """A set of ranks for people: "rank 3", "ranks 0-3, 8"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(numbers) != 1 else ''} {text or 'none'}"


def host(name: str, numbers: Sequence[int]) -> str:
    """A host and its ranks: "host b (ranks 4-7)"."""
    return f"host {name} ({ranks(numbers)})" if numbers else f"host {name}"


def member(name: str, pid: int, host_name: str) -> str:
    """One process of the job: "rank 3 (pid 123, host b)"."""
    return f"{name} (pid {pid}, host {host_name})"


def ended(who: str, ending: Ending | None, out_of_memory: bool) -> str:
    """A member that ended without having said why."""
    if ending is None:
        how = "was killed or crashed without a word"
    elif ending.signal is not None:
        how = f"was killed by {_signal_name(ending.signal)}"
    else:
        how = f"ended with exit code {ending.code} without a word"
    return f"{who} {how}" + ("; the kernel's OOM killer was at work on that host" if out_of_memory else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def said(who: str, cause: str) -> str:
    """A member's own report, as one line."""
    return f"{who}: {' '.join(cause.split())}"


def stopped(who: str, for_s: float) -> str:
    """A member in state T."""
    return f"{who} has been stopped (SIGSTOP) for {seconds(for_s)}"


def stuck(who: str, step: int, for_s: float) -> str:
    """A step in flight without progress."""
    return (
        f"{who} hung: step {step} has made no progress for {seconds(for_s)} "
        "(every rank was asked to write its stacks to its log)"
    )


def idle(who: str, for_s: float) -> str:
    """A loop that waits for messages and does not turn, although heartbeats are sent."""
    return f"{who} hung: its loop has not turned for {seconds(for_s)}, although the driver sends heartbeats"


def silent(who: str, for_s: float) -> str:
    """A driver that sends no heartbeats any more."""
    return f"{who} hung: it has sent no heartbeat for {seconds(for_s)}"


def stalled(who: str, for_s: float) -> str:
    """A driver that has work and does not get on with it, while no rank is in a step for as long."""
    return f"{who} hung: its loop has made no progress for {seconds(for_s)}, and no step has run as long"


def owes_reply(rank: int, host_name: str, driver: str, for_s: float) -> str:
    """A rank without a step that has run for long, whose driver waits for its reply."""
    return (
        f"rank {rank} (host {host_name}) hung: {driver} has waited {seconds(for_s)} for its reply, "
        "and no step has run as long"
    )


def host_silent(where: str, for_s: float) -> str:
    """A host from which nothing comes any more."""
    return (
        f"{where} has been silent for {seconds(for_s)}: "
        "its machine, its network link or its watcher is gone or has stopped"
    )


def watcher_gone(where: str) -> str:
    """A host whose watcher closed its connection without a farewell."""
    return f"{where}: its watcher is gone (killed, or the machine went down)"


def host_lost(where: str, silent_s: float, rank_timeout: float) -> str:
    """A host whose connection has closed; members end a stopped watcher, so silence may have come first."""
    return host_silent(where, silent_s) if silent_s > rank_timeout / 2 else watcher_gone(where)


def agent_gone(pid: int, host_name: str) -> str:
    """The torchrun agent is the parent of the ranks."""
    return f"torchrun's agent (pid {pid}) on host {host_name} is gone"


def not_joined(where: str, limit_s: float) -> str:
    """A host whose watcher never came."""
    return (
        f"{where}: its watcher has not connected within {seconds(limit_s)} after the rendezvous: "
        "did the host die, or does a firewall between the hosts block TCP to the head?"
    )


def head_unreachable(where: str, head: str, address: str, port: int, limit_s: float, reason: str) -> str:
    """The way to the head's watcher is blocked, or it refused us."""
    return (
        f"the watcher of {where} could not join that of the head {head} at {address} port {port} "
        f"within {seconds(limit_s)}: {reason}"
    )
