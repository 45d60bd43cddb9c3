"""A job without a model, to test torchrun's and our job control: `-m tests.support.light_job FLAGS`.

Ranks, watchers, votes and rank 0's child are the program's own. The child answers every GET with JSON: the
round, and when the last failure was detected. Ranks wait for the end. So a round starts in seconds.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

from spmd_serve.commands.serve import open_listener, plan_endpoints
from spmd_serve.commands.start_table import start_table
from spmd_serve.commands.startup import job_spec, resolve_layout
from spmd_serve.config.flags import AUTO, preparse
from spmd_serve.errors import SpmdError
from spmd_serve.job.driver_process import DriverChild, _child_ended
from spmd_serve.job.job import REPORT_S, Job
from spmd_serve.job.probe_port import open_probes
from spmd_serve.server.listener import about_to_listen
from spmd_serve.system import log
from spmd_serve.system.report import report
from spmd_serve.topology import Layout
from tests.support.view import fetch_view

if TYPE_CHECKING:
    from spmd_serve.server.listener import HttpListener


def given_sizes(words: Sequence[str]) -> dict[str, int | str | None]:
    """Return TP, PP and DP as vLLM's parser does."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag, name in (("-tp", "tensor"), ("-pp", "pipeline"), ("-dp", "data")):
        parser.add_argument(
            flag, dest=f"{name}_parallel_size", type=lambda text: AUTO if text == AUTO else int(text)
        )
    return dict(vars(parser.parse_known_args(words)[0]))


def serve(job: Job, listener: "HttpListener", layout: Layout, started: float) -> None:
    """Fork the child that answers requests."""
    spec = job_spec(job, layout)
    cluster = job.membership.cluster
    answer = {
        "round_id": job.membership.round_id,
        "dp": layout.dp,
        "hostnames": cluster.hostnames,
        "pids": {f"rank {info.rank}": info.pid for info in cluster.ranks},
    }

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            last = fetch_view(spec.watcher, 5.0)["history"].get("last", {})
            body = json.dumps(answer | {"detected_at": last.get("detected_at", 0.0)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    def body() -> int:
        about_to_listen(listener.sock)
        server = HTTPServer(("", 0), Answer, bind_and_activate=False)
        server.socket.close()
        server.socket = listener.sock
        server.server_activate()
        server.serve_forever()
        return 0

    url = listener.url_of(tls=False)
    log.say(start_table(cluster, layout, {url: range(layout.dp)}))
    child = DriverChild.start("API server", body, spec, fork_engines=False)
    listener.sock.close()
    job.drain_with(lambda reason: child.drain())
    job.before_exit(lambda: child.wait(REPORT_S))
    child.watch(lambda code: job.announce_end(0) if code == -15 else _child_ended(job, "API server", code))

    def ready() -> None:
        job.says_that_it_serves()
        job.say(f"ready after {time.monotonic() - started:.0f} s: {url}")

    child.poll_until(listener.answers, ready)


def main() -> None:
    started = time.monotonic()
    parsed = preparse(sys.argv[1:])
    job = Job.enter(parsed.flags)
    with job.reported():
        open_probes(job)
        with job.voting("the command line"):
            layout = resolve_layout(job, given_sizes(parsed.rest))
        listener = open_listener(job, parsed, plan_endpoints(job, layout))
        job.link.entry.state("loading")
        if listener is not None:
            serve(job, listener, layout, started)
        threading.Event().wait()  # a root cause or the announced end ends this process


if __name__ == "__main__":
    log.set_up()
    try:
        main()
    except SpmdError as problem:
        report(problem)
        sys.exit(problem.exit_code)
