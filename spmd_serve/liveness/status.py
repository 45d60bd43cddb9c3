"""The status of the job as a watcher sees it: for probes, for our HTTP routes and for people."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_serve.wire.lines import Message

Tables = Mapping[int, tuple[Sequence[Message], float]]
"""By node number: one row per member, and how long ago these were sent, seconds."""


def build(
    round_id: str | None,
    node: int,
    hostnames: Sequence[str],
    ranks: Sequence[Sequence[int]],
    tables: Tables,
    **facts: Any,
) -> Message:
    """Return the status: of the whole job on the head, of this node elsewhere.

    `facts` are added as they are. Ages are in seconds; "clock" is Unix time.
    """
    return {
        "round_id": round_id,
        "node": node,
        "clock": time.time(),
        "nodes": [
            {
                "node": number,
                "hostname": name,
                "ranks": list(ranks[number]),
                "seen_s_ago": round(tables[number][1], 3) if number in tables else None,
            }
            for number, name in enumerate(hostnames)
        ],
        "members": [
            _aged(row, number, hostnames[number], silent_s)
            for number, (table, silent_s) in sorted(tables.items())
            for row in sorted(table, key=_place)
        ],
        **facts,
    }


def _place(row: Message) -> tuple[bool, int]:
    """Sort ranks by number, then the other members, and ranks without a number yet, as they came."""
    return row["rank"] is None, row["rank"] or 0


def _aged(row: Message, node: int, hostname: str, silent_s: float) -> Message:
    """Return a member's row, which was sent `silent_s` seconds ago, aged to now."""
    aged = {
        name: round(row[name] + silent_s, 3) for name in ("age_s", "in_flight_s") if row.get(name) is not None
    }
    return {"node": node, "hostname": hostname, **row, **aged}


def socket_name(address: str) -> str:
    """Return the kernel's name of an address of `watcher_address`: "@name" is an abstract socket name."""
    return "\0" + address[1:] if address.startswith("@") else address
