"""One rank's problem is everybody's: all ranks say the same and leave together, before anything is loaded."""

import time

from spmd_serve.errors import PeerLost, SpmdError, UsageError
from spmd_serve.rendezvous.handshake import leave_together
from spmd_serve.rendezvous.store import Say, Store, get_json, put_json, wait_keys
from spmd_serve.topology import Cluster, RankInfo

_LATER_S = 5.0


def vote(
    store: Store,
    me: RankInfo,
    cluster: Cluster,
    what: str,
    problem: SpmdError | None,
    timeout_s: float,
    say: Say,
) -> None:
    """Tell the others whether `what` went well here; returns when it did on every rank.

    Raises the problem of the lowest rank that has one, on every rank with the same text (UsageError), and
    PeerLost when a rank does not vote within `timeout_s` seconds.
    """
    put_json(store, f"vote/{what}/{me.rank}", str(problem) if problem is not None else None)
    root_cause_key = f"vote/{what}/verdict"
    if me.rank == 0:
        put_json(store, root_cause_key, _count(store, cluster, what, timeout_s, say))
    root_cause = get_json(
        store, root_cause_key, timeout_s + _LATER_S, f"the vote on {what}", str(cluster.ranks[0]), say
    )
    if root_cause is None:
        return
    leave_together(store, f"vote/{what}/told", len(cluster.ranks))
    raise (PeerLost if root_cause["lost"] else UsageError)(root_cause["message"])


def _count(store: Store, cluster: Cluster, what: str, timeout_s: float, say: Say) -> dict[str, object] | None:
    keys = {f"vote/{what}/{info.rank}": str(info) for info in cluster.ranks}
    try:
        wait_keys(store, keys, time.monotonic() + timeout_s, say, what=what)
    except PeerLost as lost:
        return {"lost": True, "message": str(lost)}
    problems: dict[str, list[RankInfo]] = {}
    for key, info in zip(keys, cluster.ranks, strict=True):
        message = get_json(store, key, timeout_s, what, str(info), say)
        if message is not None:
            problems.setdefault(message, []).append(info)
    for message, ranks in problems.items():
        everywhere = len(ranks) == len(cluster.ranks)
        return {"lost": False, "message": message if everywhere else f"{ranks[0]}: {message}"}
    return None
