"""Prometheus text of a watcher's view, for the head's /metrics and for each node's probe port. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, object]

# Key in a member's row, metric name, metric type, help text.
_OF_RANKS = (
    ("age_s", "rank_sign_age_seconds", "gauge", "Seconds since the rank's last step or heartbeat."),
    ("steps", "rank_steps_total", "counter", "Driver's messages that the rank has executed."),
    ("busy_s", "rank_busy_seconds_total", "counter", "Seconds that the rank has spent executing them."),
    ("in_flight_s", "rank_step_in_flight_seconds", "gauge", "Age of the step in flight."),
    ("cpu_s", "rank_cpu_seconds_total", "counter", "CPU seconds of the rank's process."),
)
_OF_DRIVERS = (
    ("sent", "control_messages_total", "counter", "Messages that a driver has sent to its ranks."),
    ("send_s", "control_send_seconds_total", "counter", "Seconds that a driver has spent sending them."),
    ("host_bytes", "control_host_bytes_total", "counter", "Their bytes inside the node, once each."),
    ("network_bytes", "control_network_bytes_total", "counter", "Their bytes to other nodes, once each."),
)


def render(view: Mapping[str, Any]) -> str:
    """Return all metrics of the processes in `view` (see `status.build`)."""
    return "\n".join(_lines(view)) + "\n"


def _lines(view: Mapping[str, Any]) -> Iterator[str]:
    members = view["members"]
    ranks = [
        ({"rank": row["rank"], "host": row["hostname"]}, row) for row in members if row["kind"] == "rank"
    ]
    drivers = [({"engine": row["name"], "host": row["hostname"]}, row) for row in members if row.get("sent")]
    yield from _metric("info", "gauge", "This round.", [({"generation": view["round_id"] or ""}, 1)])
    yield from _metric("ready", "gauge", "1 while new requests are admitted.", [({}, int(is_ready(view)))])
    yield from _metric(
        "draining", "gauge", "1 once the job drains.", [({}, int(view["draining"] is not None))]
    )
    restarts = view["restarts"]
    yield from _metric(
        "agent_restarts", "gauge", "Restarts as this node's agent counts them.", [({}, restarts)]
    )
    up = [(labels, int(row["state"] not in ("gone", "stopped"))) for labels, row in ranks]
    yield from _metric("rank_up", "gauge", "0 when the rank's process is gone or stopped.", up)
    for rows, table in ((ranks, _OF_RANKS), (drivers, _OF_DRIVERS)):
        for field, name, kind, text in table:
            samples = [(labels, row[field]) for labels, row in rows if row.get(field) is not None]
            yield from _metric(name, kind, text, samples)
    nodes = [({"host": node["hostname"]}, node["seen_s_ago"]) for node in view["nodes"]]
    seen = [(labels, age) for labels, age in nodes if age is not None]
    yield from _metric("host_sign_age_seconds", "gauge", "Age of a node's last message, seconds.", seen)
    yield from _of_failures(view.get("history") or {}, view["root_cause"])


def _of_failures(history: Mapping[str, Any], root_cause: Mapping[str, Any] | None) -> Iterator[str]:
    failures = history.get("failures", 0) + (root_cause is not None)
    yield from _metric("failures_total", "counter", "Rounds of this job that have failed.", [({}, failures)])
    last = root_cause if root_cause is not None else history.get("last") or {}
    for field, name, text in (
        ("detected_at", "last_failure_timestamp_seconds", "When the last failure was detected (Unix time)."),
        (
            "detect_s",
            "last_failure_detect_seconds",
            "From the death, or the last activity of what hung, to its detection.",
        ),
    ):
        yield from _metric(name, "gauge", text, [({}, last[field])] if last.get(field) is not None else [])
    if history.get("recover_s") is not None and root_cause is None:
        text = "From the detection of the last failure until the job served again."
        yield from _metric("last_failure_recover_seconds", "gauge", text, [({}, history["recover_s"])])


def is_ready(view: Mapping[str, Any]) -> bool:
    """Return whether the job serves and admits new requests."""
    is_ending = view["draining"] is not None or view["root_cause"] is not None or view["ended"]
    return bool(view["serving"]) and not is_ending


def _metric(name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    shown = [f"spmd_serve_{name}{_braces(labels)} {value}" for labels, value in samples]
    if shown:
        yield f"# HELP spmd_serve_{name} {text}"
        yield f"# TYPE spmd_serve_{name} {kind}"
        yield from shown


def _braces(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
