"""Responses of a node's probe port, over real sockets, and the metrics as Prometheus reads them."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spmd_serve.liveness import metrics
from spmd_serve.liveness.event_loop import Loop
from spmd_serve.liveness.probe import Probe, respond
from spmd_serve.liveness.protocol import RootCause
from spmd_serve.liveness.serving import Serving

LIMIT_S = 10.0
ROOT_CAUSE = {
    "cause": "rank 1 is gone",
    "rank": 1,
    "hostname": "b",
    "detected_at": 1000.0,
    "detect_s": 0.3,
}


def view_of(**changes: Any) -> dict[str, Any]:
    """Return the status of a watcher with two ranks and a driver."""
    rank = {"kind": "rank", "hostname": "a", "state": "ready", "steps": 7, "age_s": 0.5, "busy_s": 1.25}
    members = [
        rank | {"name": "rank 0", "rank": 0, "in_flight_s": None},
        rank | {"name": "rank 1", "rank": 1, "hostname": 'b"\\', "in_flight_s": 0.125},
        {
            "kind": "engine",
            "name": "engine core",
            "rank": None,
            "hostname": "a",
            "state": "ready",
            "sent": 9,
            "host_bytes": 450,
            "network_bytes": 900,
            "send_s": 0.25,
        },
    ]
    view = {
        "round_id": "abc",
        "restarts": 2,
        "nodes": [{"hostname": "a", "seen_s_ago": 0.0}, {"hostname": "b", "seen_s_ago": None}],
        "members": members,
        "serving": True,
        "history": {},
        "draining": None,
        "ended": False,
        "root_cause": None,
    }
    return view | changes


class FakeWatcher:
    """Provide what a probe port needs of a watcher; `asked` counts the calls of `status`."""

    def __init__(self, **changes: Any) -> None:
        self.now = 0.0
        self.changes = changes
        self.found: list[dict[str, Any]] = []
        self.asked = 0

    def status(self) -> dict[str, Any]:
        self.asked += 1
        return view_of(**self.changes)

    def troubles(self) -> list[dict[str, Any]]:
        return self.found

    def open_probe(self, loop: Loop, port: int = 0) -> Probe:
        return Probe(loop, port, lambda: self.now, self.status, self.troubles)

    def respond(self, request_line: bytes) -> bytes:
        return respond(request_line, self.status(), self.troubles)


def ask(path: str, watcher: FakeWatcher) -> tuple[int, Any]:
    head, _, body = watcher.respond(f"GET {path} HTTP/1.1".encode()).decode().partition("\r\n\r\n")
    return int(head.split()[1]), body if path == "/metrics" else json.loads(body)


def samples(view: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """Return values by name and label values, as Prometheus' own parser reads them."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render(view))
        for sample in family.samples
    }


def test_live_and_ready() -> None:
    watcher = FakeWatcher()
    assert ask("/live", watcher)[0] == 200
    assert ask("/ready", watcher)[0] == 200
    assert ask("/ready?x=1", watcher)[0] == 200
    assert ask("/health", watcher)[0] == 404


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"serving": False}, "loading"),
        ({"draining": "SIGTERM"}, "draining"),
        ({"root_cause": ROOT_CAUSE}, "failed"),
        ({"ended": True}, "ended"),
    ],
)
def test_not_ready(changes: dict[str, Any], status: str) -> None:
    code, body = ask("/ready", FakeWatcher(**changes))
    assert (code, body["status"]) == (503, status)


def test_loading_and_draining_are_live() -> None:
    assert ask("/live", FakeWatcher(serving=False))[0] == 200
    assert ask("/live", FakeWatcher(draining="SIGTERM"))[0] == 200


def test_a_stuck_rank_is_not_live_and_is_named() -> None:
    watcher = FakeWatcher()
    watcher.found = [{"rank": 1, "pid": 5, "trouble": "stopped"}]
    code, body = ask("/live", watcher)
    assert code == 503 and body["ranks"] == watcher.found


def test_a_failed_job_names_the_cause() -> None:
    code, body = ask("/live", FakeWatcher(root_cause=ROOT_CAUSE))
    assert code == 503 and body["cause"] == "rank 1 is gone" and body["rank"] == 1


def test_other_methods_and_garbage_are_refused() -> None:
    assert FakeWatcher().respond(b"POST /live HTTP/1.1").startswith(b"HTTP/1.1 405 ")
    assert FakeWatcher().respond(b"\xff\xfe").startswith(b"HTTP/1.1 405 ")
    assert FakeWatcher().respond(b"HEAD /live HTTP/1.1").endswith(b"\r\n\r\n")


def test_metrics_are_what_prometheus_reads() -> None:
    found = samples(view_of())
    assert found[("spmd_serve_rank_steps_total", "0", "a")] == 7
    assert found[("spmd_serve_rank_sign_age_seconds", "1", 'b"\\')] == 0.5
    assert found[("spmd_serve_rank_step_in_flight_seconds", "1", 'b"\\')] == 0.125
    assert ("spmd_serve_rank_step_in_flight_seconds", "0", "a") not in found
    assert found[("spmd_serve_control_messages_total", "engine core", "a")] == 9
    assert found[("spmd_serve_control_host_bytes_total", "engine core", "a")] == 450
    assert found[("spmd_serve_control_network_bytes_total", "engine core", "a")] == 900
    assert found[("spmd_serve_ready",)] == 1 and found[("spmd_serve_failures_total",)] == 0
    assert found[("spmd_serve_info", "abc")] == 1
    assert 'spmd_serve_info{generation="abc"} 1' in metrics.render(view_of()).splitlines()
    assert ("spmd_serve_host_sign_age_seconds", "b") not in found


def test_metrics_count_earlier_failures() -> None:
    history = {"failures": 3, "last": ROOT_CAUSE, "recover_s": 4.5}
    found = samples(view_of(history=history))
    assert found[("spmd_serve_failures_total",)] == 3
    assert found[("spmd_serve_last_failure_detect_seconds",)] == 0.3
    assert found[("spmd_serve_last_failure_recover_seconds",)] == 4.5
    found = samples(view_of(history=history, root_cause=ROOT_CAUSE))
    assert found[("spmd_serve_failures_total",)] == 4 and found[("spmd_serve_ready",)] == 0
    assert ("spmd_serve_last_failure_recover_seconds",) not in found


def test_the_job_serves_when_all_endpoints_do(tmp_path: Path) -> None:
    Serving(tmp_path).record_failure(RootCause.from_json(ROOT_CAUSE))
    serving = Serving(tmp_path)
    message = {"t": "serving", "of": 2}
    assert not serving.on_endpoint(message | {"part": 1})
    assert not serving.on_endpoint(message | {"part": 1})
    assert not serving.all
    assert serving.on_endpoint(message | {"part": 0})
    assert serving.all and serving.history["recover_s"] > 0
    elsewhere = Serving(None)
    elsewhere.on_all(serving.event())
    assert elsewhere.all and elsewhere.history == serving.history
    assert serving.history["failures"] == 1
    serving.record_failure(RootCause.from_json(ROOT_CAUSE))
    assert Serving(tmp_path).history["failures"] == 2


def test_over_a_socket_in_pieces_and_a_port_taken(request: pytest.FixtureRequest) -> None:
    loop, watcher = Loop(), FakeWatcher()
    probe = watcher.open_probe(loop)
    request.addfinalizer(probe.close)
    with pytest.raises(OSError, match="in use"):
        watcher.open_probe(loop, probe.port)
    client = socket.create_connection(("127.0.0.1", probe.port), timeout=LIMIT_S)
    with client:
        answer = b""
        for piece in (b"GET /live HT", b"TP/1.1\r\nHost: x\r", b"\n\r\n"):
            client.sendall(piece)
            for call in loop.wait(LIMIT_S):
                call()
            for call in loop.wait(0.0):
                call()
        while data := client.recv(4096):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b'{"status": "live"}' in answer


def test_a_silent_client_is_dropped(request: pytest.FixtureRequest) -> None:
    loop, watcher = Loop(), FakeWatcher()
    probe = watcher.open_probe(loop)
    request.addfinalizer(probe.close)
    with socket.create_connection(("127.0.0.1", probe.port), timeout=LIMIT_S) as client:
        for call in loop.wait(LIMIT_S):
            call()
        watcher.now = 60.0
        probe.tick()
        assert client.recv(1) == b""


def turn(loop: Loop, timeout_s: float = 0.0) -> None:
    for call in loop.wait(timeout_s):
        call()


def test_a_connection_gets_one_answer_whatever_it_sends(request: pytest.FixtureRequest) -> None:
    loop, watcher = Loop(), FakeWatcher()
    probe = watcher.open_probe(loop)
    request.addfinalizer(probe.close)
    with socket.create_connection(("127.0.0.1", probe.port), timeout=LIMIT_S) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n" + b"\n" * 60_000)
        turn(loop, LIMIT_S)
        for _ in range(20):
            turn(loop)
    assert watcher.asked == 1


def test_the_oldest_connection_is_closed_for_a_new_one(request: pytest.FixtureRequest) -> None:
    loop, watcher = Loop(), FakeWatcher()
    probe = watcher.open_probe(loop)
    request.addfinalizer(probe.close)
    clients = [socket.create_connection(("127.0.0.1", probe.port), timeout=LIMIT_S) for _ in range(80)]
    for client in clients:
        request.addfinalizer(client.close)
    for _ in range(80):
        turn(loop, LIMIT_S)
    clients[-1].sendall(b"GET /ready HTTP/1.1\r\n\r\n")
    turn(loop, LIMIT_S)
    assert clients[-1].recv(4096).startswith(b"HTTP/1.1 200 OK")
    assert clients[0].recv(1) == b""
