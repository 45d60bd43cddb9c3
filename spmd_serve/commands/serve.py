"""``spmd_serve serve``: join the other ranks, agree, bind the HTTP ports, serve, end."""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spmd_serve.commands.startup import agree, engine_config, job_spec, print_table, run_shard
from spmd_serve.config.endpoints import Endpoint, check_spread, check_uds, endpoints, ports
from spmd_serve.config.flags import AUTO, PreparsedArgs
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.errors import ExitCode
from spmd_serve.job.driver_process import DriverChild, end, start_child
from spmd_serve.job.job import Job
from spmd_serve.job.probe_port import open_probes
from spmd_serve.system import log, network
from spmd_serve.topology import Layout, spans

if TYPE_CHECKING:
    from spmd_serve.server.listener import HttpListener

TEARDOWN_S = 10
"""Seconds that vLLM's processes may take to exit after the drain; vLLM then kills them."""
ONE_FOR_ALL = Endpoint(0, rank=0, replicas=range(0), place=0)
"""The endpoint of ``--lb internal``, before it is known how many replicas there are."""


def serve(preparsed: PreparsedArgs) -> int:
    """Serve until told to stop, and return the exit code. Raises SpmdError for a mistake of the user."""
    if preparsed.wants_help:
        return print_help(preparsed)
    started = time.monotonic()
    # vLLM writes this variable itself while it builds its configuration.
    fork_engines = "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    job = Job.enter(preparsed.flags)
    with job.reported():
        open_probes(job)
        # A single endpoint is bound at once; several depend on the sizes, which cost an import of vLLM.
        listener = open_listener(job, preparsed, (ONE_FOR_ALL,)) if preparsed.flags.lb == "internal" else None
        args, layout = agree(job, preparsed)
        given = args.given_sizes["data_parallel_size"]
        opened = plan_endpoints(job, layout, shrinks=given == AUTO)
        listener = listener if preparsed.flags.lb == "internal" else open_listener(job, preparsed, opened)
        spec, drain_s = job_spec(job, layout), args.shutdown_timeout
        config = engine_config(job, args)
        api = start_api(job, args, spec, config, opened, listener, fork_engines, started)
        run_shard(job, config, spec)
        return end(job, api, drain_s)


def print_help(preparsed: PreparsedArgs) -> int:
    """Print all flags: ours first, then vLLM's (``--help=all``, ``--help=GROUP`` as in vLLM)."""
    from spmd_serve.engine.config import make_parser

    make_parser().parse_args(list(preparsed.rest))
    return ExitCode.OK


def open_listener(job: Job, preparsed: PreparsedArgs, opened: Sequence[Endpoint]) -> "HttpListener | None":
    """Bind this rank's HTTP port, if it has one, before the model is loaded."""
    from spmd_serve.server.listener import open_listener as bind

    listener = None
    with job.voting("the HTTP ports"):
        check_uds(preparsed.uds, opened, job.membership.cluster)
        numbers = ports(preparsed.ports, opened, job.membership.cluster)
        mine = own_endpoint(job, opened)
        if mine is not None:
            listener = bind(preparsed.host, numbers[mine.number], preparsed.uds)
    return listener


def own_endpoint(job: Job, opened: Sequence[Endpoint]) -> Endpoint | None:
    """Return the endpoint that this rank opens, or None."""
    return next((endpoint for endpoint in opened if endpoint.rank == job.membership.me.rank), None)


def plan_endpoints(job: Job, layout: Layout, *, shrinks: bool = False) -> tuple[Endpoint, ...]:
    """Return the endpoints of the job. `shrinks`: nodes may be missing, so the spread is not checked."""
    cluster = job.membership.cluster
    with job.voting("the endpoints"):
        if not shrinks:
            check_spread(job.flags.lb, layout, cluster)
    return endpoints(job.flags.lb, layout, cluster)


def start_api(
    job: Job,
    args: argparse.Namespace,
    spec: JobSpec,
    config: Any,
    opened: Sequence[Endpoint],
    listener: "HttpListener | None",
    fork_engines: bool,
    started: float,
) -> DriverChild | None:
    """Fork the API server of a rank that has an endpoint. No thread of torch may run yet.

    Rank 0 prints the table of all ranks first.
    """
    if listener is None:
        return None
    from spmd_serve.engine.config import apply_coupled_endpoint, apply_endpoint
    from spmd_serve.server.api import serve_http

    mine = own_endpoint(job, opened)
    assert mine is not None
    tls = bool(args.ssl_keyfile and args.ssl_certfile)
    url = listener.url_of(tls=tls, address=job.membership.me.address if len(opened) > 1 else None)
    name, behind = "API server", ""
    if len(opened) > 1:
        behind = f" ({spans('replica', mine.replicas)})"
        name += f" of {spans('replica', mine.replicas)}"
        job.part = (mine.number, len(opened))
        if config.model_config.is_moe and spec.layout.dp > 1:
            apply_coupled_endpoint(args, mine, *coordinator_address(job, mine))
        else:
            spec = replace(spec, first_replica=mine.replicas.start)
            apply_endpoint(args, mine)
    urls = exchange_urls(job, opened, mine, url)
    if urls is not None:
        print_table(spec, urls)
    spec = replace(spec, drain_s=args.shutdown_timeout)
    args.shutdown_timeout += TEARDOWN_S
    child = start_child(job, args, spec, name, lambda: serve_http(args, listener, url), fork_engines)
    listener.sock.close()

    def ready() -> None:
        seconds = time.monotonic() - started
        job.says_that_it_serves()
        log.say(f"spmd_serve: ready after {seconds:.0f} s: {url}{behind}")

    child.poll_until(listener.answers, ready)
    return child


def coordinator_address(job: Job, mine: Endpoint) -> tuple[str, int]:
    """Return the address of the coordinator of all endpoints' engine cores: a free port on the head."""
    from spmd_serve.rendezvous.join import get_json, put_json

    store, key = job.membership.store, "coordinator"
    head = job.membership.cluster.ranks[0]
    if mine.rank == head.rank:
        put_json(store, key, network.free_port(head.address))
    port = get_json(store, key, job.flags.join_timeout, "the coordinator's port", str(head), job.say)
    return head.address, port


def exchange_urls(
    job: Job, opened: Sequence[Endpoint], mine: Endpoint, url: str
) -> dict[str, Sequence[int]] | None:
    """Return, on rank 0, every URL with its replicas; other ranks send rank 0 their URL and return None."""
    from spmd_serve.rendezvous.join import get_json, put_json

    store = job.membership.store
    if mine.rank != 0:
        put_json(store, f"url/{mine.number}", url)
        return None
    urls: dict[str, Sequence[int]] = {}
    for endpoint in opened:
        info = job.membership.cluster.ranks[endpoint.rank]
        urls[
            url
            if endpoint is mine
            else get_json(
                store, f"url/{endpoint.number}", job.flags.join_timeout, "the URL", str(info), job.say
            )
        ] = endpoint.replicas
    return urls
