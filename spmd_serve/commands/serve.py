"""``spmd_serve serve``: meet the other ranks, agree, open the HTTP doors, serve, end."""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spmd_serve.commands.startup import agree, engine_config
from spmd_serve.config.endpoints import Endpoint, check_spread, check_uds, endpoints, ports
from spmd_serve.config.flags import AUTO, PreparsedArgs
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.errors import ExitCode
from spmd_serve.job.driver_process import DriverChild
from spmd_serve.job.drivers import end, start_child
from spmd_serve.job.job import Job
from spmd_serve.job.probe_port import open_probes
from spmd_serve.system import cores, log, network
from spmd_serve.system.busy_poll import may_busy_poll
from spmd_serve.topology import Layout, spans

if TYPE_CHECKING:
    from spmd_serve.server.listener import Listener

HEARTBEAT_S = 2.0
"""Seconds between an idle driver's signs of life to its ranks."""
TEARDOWN_S = 10
"""Seconds that vLLM's processes may take to leave after the drain: vLLM kills them then, whatever they do."""
ONE_FOR_ALL = Endpoint(0, rank=0, replicas=range(0), place=0)
"""The endpoint of ``--lb internal``, before it is known how many replicas there are."""


def serve(early: PreparsedArgs) -> int:
    """Serve until told to stop. Returns the exit code; raises SpmdError for what a person must mend."""
    if early.wants_help:
        return print_help(early)
    started = time.monotonic()
    # vLLM writes this variable itself while it builds its configuration.
    fork_engines = "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    job = Job.enter(early.flags)
    with job.reported():
        open_probes(job)
        # One for all is opened at once: the sizes, on which others depend, cost an import of vLLM.
        door = open_listener(job, early, (ONE_FOR_ALL,)) if early.flags.lb == "internal" else None
        args, layout = agree(job, early)
        given = args.given_sizes["data_parallel_size"]
        opened = plan_endpoints(job, layout, shrinks=given == AUTO)
        door = door if early.flags.lb == "internal" else open_listener(job, early, opened)
        spec, drain_s = job_spec(job, layout), args.shutdown_timeout
        config = engine_config(job, args)
        api = start_api(job, args, spec, config, opened, door, fork_engines, started)
        run_shard(job, config, spec)
        return end(job, api, drain_s)


def print_help(early: PreparsedArgs) -> int:
    """All flags: ours first, then vLLM's (``--help=all``, ``--help=GROUP`` as in vLLM)."""
    from spmd_serve.engine.config import make_parser

    make_parser().parse_args(list(early.rest))
    return ExitCode.OK


def open_listener(job: Job, early: PreparsedArgs, opened: Sequence[Endpoint]) -> "Listener | None":
    """Bind this rank's HTTP port, if it has one, long before anything is loaded."""
    from spmd_serve.server.listener import open_listener as bind

    door = None
    with job.voting("the HTTP ports"):
        check_uds(early.uds, opened, job.membership.cluster)
        numbers = ports(early.ports, opened, job.membership.cluster)
        mine = own_endpoint(job, opened)
        if mine is not None:
            door = bind(early.host, numbers[mine.number], early.uds)
    return door


def own_endpoint(job: Job, opened: Sequence[Endpoint]) -> Endpoint | None:
    """The endpoint that this rank opens."""
    return next((endpoint for endpoint in opened if endpoint.rank == job.membership.me.rank), None)


def plan_endpoints(job: Job, layout: Layout, *, shrinks: bool = False) -> tuple[Endpoint, ...]:
    """Who opens an endpoint for which replicas; `shrinks`: there may be fewer nodes than the user meant."""
    cluster = job.membership.cluster
    with job.voting("the endpoints"):
        if not shrinks:
            check_spread(job.flags.lb, layout, cluster)
    return endpoints(job.flags.lb, layout, cluster)


def job_spec(job: Job, layout: Layout) -> JobSpec:
    """What drivers and ranks need to know to find each other."""
    membership, flags = job.membership, job.flags
    return JobSpec(
        backend=flags.control_backend,
        lb=flags.lb,
        store_host=membership.host,
        store_port=membership.port,
        round_id=membership.round_id,
        cluster=membership.cluster,
        layout=layout,
        watcher=job.watcher,
        key_file=flags.control_key_file,
        allow_classes=flags.control_allow_class,
        heartbeat_s=HEARTBEAT_S,
        join_timeout_s=flags.join_timeout,
        step_timeout_s=flags.step_timeout,
        busy_poll=may_busy_poll(membership.cluster, membership.me, cores.lent()),
    )


def start_api(
    job: Job,
    args: argparse.Namespace,
    spec: JobSpec,
    config: Any,
    opened: Sequence[Endpoint],
    door: "Listener | None",
    fork_engines: bool,
    started: float,
) -> DriverChild | None:
    """On a rank with an endpoint: fork its API server. No thread of torch may run yet.

    Rank 0 first says who runs where.
    """
    if door is None:
        return None
    from spmd_serve.engine.config import apply_coupled_endpoint, apply_endpoint
    from spmd_serve.server.api import serve_http

    mine = own_endpoint(job, opened)
    assert mine is not None
    tls = bool(args.ssl_keyfile and args.ssl_certfile)
    url = door.url_of(tls=tls, address=job.membership.me.address if len(opened) > 1 else None)
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
    child = start_child(job, args, spec, name, lambda: serve_http(args, door, url), fork_engines)
    door.sock.close()

    def ready() -> None:
        seconds = time.monotonic() - started
        job.says_that_it_serves()
        log.say(f"spmd_serve: ready after {seconds:.0f} s: {url}{behind}")

    child.poll_until(door.answers, ready)
    return child


def coordinator_address(job: Job, mine: Endpoint) -> tuple[str, int]:
    """Where engine cores of all endpoints meet: on the head, at a port that is free there now."""
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
    """On rank 0: every URL with the replicas behind it; the others tell it theirs and get None."""
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


def print_table(spec: JobSpec, urls: Mapping[str, Sequence[int]]) -> None:
    """On rank 0: who runs where, as what, and where to ask."""
    from spmd_serve.commands.start_table import start_table

    log.say(start_table(spec.cluster, spec.layout, urls))


def run_shard(job: Job, config: Any, spec: JobSpec) -> None:
    """Load this rank's part of the model, then execute the driver's messages until it stops."""
    from spmd_serve.engine.worker_proc import TorchrunWorkerProc, check_layout, open_world, place_config

    me = job.membership.me
    place_on_cores(job, spec)
    job.link.entry.state("loading")
    place_config(config, spec, me)
    open_world(config, job.membership.store, spec, me)
    shard = TorchrunWorkerProc(config, spec, me, job.membership.store, job.link)
    check_layout(spec, me)
    job.serving = True
    shard.run()


def place_on_cores(job: Job, spec: JobSpec) -> None:
    """Bind this rank to its share of the machine's cores, which several agents of one machine share too."""
    import torch

    mine = cores.machine_share(spec.cluster, job.membership.me, sorted(os.sched_getaffinity(0)))
    cores.bind(mine)
    # OMP_NUM_THREADS was set before agents of the same machine knew of each other; a user's value stays.
    torch.set_num_threads(min(torch.get_num_threads(), max(len(mine), 1)))
