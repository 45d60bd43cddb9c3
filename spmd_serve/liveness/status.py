"""The picture of the whole job that a watcher gives to whoever asks: for probes, pages and people."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spmd_serve.liveness.status_table import EntryReading
from spmd_serve.wire.lines import Message

if TYPE_CHECKING:
    from spmd_serve.liveness.members import Member
    from spmd_serve.liveness.watcher import Watcher


def build(watcher: "Watcher") -> Message:
    """The job on the head; elsewhere this host alone. Ages are seconds, the clock is Unix time."""
    config = watcher.config
    names: Sequence[str] = config.hostnames if config is not None else (watcher.host,)
    own = config.node if config is not None else 0
    tables: dict[int, tuple[list[Message], float]] = {own: (watcher.members.table(), 0.0)}
    if watcher.head is not None:
        for number, node in watcher.head.nodes.items():
            tables[number] = (node.table, watcher.now - node.heard)
    return {
        "round_id": config.round_id if config is not None else None,
        "restarts": watcher.restarts,
        "node": own,
        "clock": time.time(),
        "nodes": [
            {
                "node": number,
                "hostname": name,
                "ranks": list(config.ranks[number]) if config is not None else [],
                "seen_s_ago": round(tables[number][1], 3) if number in tables else None,
            }
            for number, name in enumerate(names)
        ],
        "members": [
            _aged(row, number, names[number], silent_s)
            for number, (table, silent_s) in sorted(tables.items())
            for row in sorted(table, key=_place)
        ],
        "serving": watcher.serving.all,
        "history": watcher.serving.history,
        "draining": watcher.drain.reason,
        "ended": watcher.has_ended,
        "root_cause": watcher.root_cause.to_json() if watcher.root_cause is not None else None,
    }


def row(member: "Member", reading: EntryReading | None) -> Message:
    """One member, with what it has noted; None: it is gone. Ages are seconds from now."""
    now, state, since = time.monotonic(), "gone", 0.0
    if reading is not None:
        state = "stopped" if member.look is not None and member.look.stopped else reading.state
        since = reading.started_at if reading.started > reading.done else reading.works_since
    return {
        "kind": member.hello.kind,
        "name": member.hello.name,
        "rank": member.hello.rank,
        "pid": member.pid,
        "state": state,
        "steps": reading.done if reading else None,
        "in_flight_s": round(now - since, 3) if since else None,
        "age_s": round(now - reading.last_sign, 3) if reading and reading.last_sign else None,
        "cpu_s": member.look.cpu_s if member.look else None,
        "busy_s": round(reading.busy_s, 3) if reading else None,
        "sent": reading.sent if reading else None,
        "host_bytes": reading.host_bytes if reading else None,
        "network_bytes": reading.network_bytes if reading else None,
        "send_s": round(reading.send_s, 6) if reading else None,
    }


def _place(row: Message) -> tuple[bool, int]:
    """A host's ranks by number, then the others, and ranks without a number yet, as they came."""
    return row["rank"] is None, row["rank"] or 0


def _aged(row: Message, node: int, host: str, silent_s: float) -> Message:
    """A member's row as it was sent `silent_s` ago, aged to now."""
    aged = {
        name: round(row[name] + silent_s, 3) for name in ("age_s", "in_flight_s") if row.get(name) is not None
    }
    return {"node": node, "hostname": host, **row, **aged}


def socket_name(address: str) -> str:
    """What the kernel calls an address of `watcher_address`: "@name" is the abstract socket name."""
    return "\0" + address[1:] if address.startswith("@") else address
