"""What serve and batch share: agreement of all ranks before loading, the job's spec, a rank's work."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_serve.channel.plan import check_backend
from spmd_serve.commands import elastic
from spmd_serve.commands.start_table import start_table
from spmd_serve.config.flags import AUTO, PreparsedArgs
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.errors import UsageError
from spmd_serve.job.job import Job
from spmd_serve.job.state import JobEvent
from spmd_serve.rendezvous.model_identity import DIRECTORY, NO_WEIGHTS
from spmd_serve.system import cores, log
from spmd_serve.system.busy_poll import may_busy_poll
from spmd_serve.system.network import host_name
from spmd_serve.topology import Layout

HEARTBEAT_S = 2.0
"""Seconds between the heartbeats of an idle driver to its ranks."""


def agree(
    job: Job, early: PreparsedArgs, more_flags: Callable[[argparse.ArgumentParser], None] | None = None
) -> tuple[argparse.Namespace, Layout]:
    """Parse vLLM's flags, resolve the sizes, and check that all ranks have the same flags and model files.

    `more_flags` adds a subcommand's own flags to the parser.
    """
    from spmd_serve.engine.config import apply_layout, flag_values, parse_serve
    from spmd_serve.rendezvous.preflight import agree as compare
    from spmd_serve.rendezvous.preflight import collect

    membership = job.membership
    with job.voting("the command line"):
        args = parse_serve(early.rest, more_flags)
        layout = resolve_layout(job, args.given_sizes)
        check_backend(job.flags.control_backend, job.flags.lb, layout, membership.cluster)
        apply_layout(args, layout)
    with job.voting("the model's files"):
        check_model(args.model)
        fingerprint = collect(flag_values(args), os.environ, args.model)
    compare(membership.store, membership.me, membership.cluster, fingerprint, job.flags.join_timeout, job.say)
    with job.voting("the model's weights"):
        if args.load_format == "auto" and fingerprint.items.get(DIRECTORY + args.model) == NO_WEIGHTS:
            raise UsageError(f"--model {args.model} has no weight files (--load-format dummy invents some)")
    return args, layout


def resolve_layout(job: Job, sizes: Mapping[str, Any]) -> Layout:
    """Return TP, PP and DP of this round. Raises UsageError if they do not multiply to the world size."""
    cluster = job.membership.cluster
    tp, pp, dp = (sizes[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data"))
    if dp != AUTO:
        return Layout.resolve(cluster.ranks_per_node, tp, pp, dp, hosts=cluster.hosts)
    try:
        layout = elastic.as_many_replicas(cluster, tp, pp)
    except UsageError:
        elastic.wait_for_nodes(cluster, job.most_nodes, job.flags.join_timeout, job.say)
        raise
    job.say(
        f"--data-parallel-size auto: {layout.dp} (of TP {layout.tp} x PP {layout.pp}, on "
        f"{layout.world_size} ranks of {len(cluster.nodes)} of at most {job.most_nodes} nodes)"
    )
    return layout


def check_model(model: str) -> None:
    """Raise UsageError if `model` is a path that does not exist here; vLLM would look for it on the hub."""
    path = os.path.expanduser(model)
    if model.startswith(("/", "./", "../", "~")) and not os.path.exists(path):
        raise UsageError(
            f"--model {model} does not exist on {host_name()}: every node needs the model at the same path"
        )


def engine_config(job: Job, args: argparse.Namespace) -> Any:
    """Build vLLM's configuration, which checks heads, lengths, quantization etc. before loading."""
    from spmd_serve.engine import vllm_compat
    from spmd_serve.engine.config import apply_executor
    from spmd_serve.engine.config import engine_config as build

    config = None
    with job.voting("the engine's configuration"):
        vllm_compat.check()
        apply_executor(args)
        config = build(args)
    return config


def job_spec(job: Job, layout: Layout) -> JobSpec:
    """Return what drivers and ranks need to find each other."""
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


def print_table(spec: JobSpec, urls: Mapping[str, Sequence[int]]) -> None:
    """Log, on rank 0, the table of all ranks and the URLs."""
    log.say(start_table(spec.cluster, spec.layout, urls))


def run_shard(job: Job, config: Any, spec: JobSpec) -> None:
    """Load this rank's shard, then run the driver's messages until it sends stop."""
    from spmd_serve.engine.worker_proc import TorchrunWorkerProc, check_layout, open_world, place_config

    me = job.membership.me
    place_on_cores(job, spec)
    job.link.entry.state("loading")
    place_config(config, spec, me)
    open_world(config, job.membership.store, spec, me)
    shard = TorchrunWorkerProc(config, spec, me, job.membership.store, job.link)
    check_layout(spec, me)
    job.life.apply(JobEvent.LOADED)
    shard.obey()


def place_on_cores(job: Job, spec: JobSpec) -> None:
    """Bind this rank to its share of the machine's cores, which all nodes on that machine share."""
    import torch

    mine = cores.machine_share(spec.cluster, job.membership.me, sorted(os.sched_getaffinity(0)))
    cores.bind(mine)
    # OMP_NUM_THREADS was set before the nodes of one machine knew of each other; a smaller value stays.
    torch.set_num_threads(min(torch.get_num_threads(), max(len(mine), 1)))
