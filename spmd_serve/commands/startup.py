"""What all ranks must agree on before anything is loaded: flags, sizes, model files, vLLM's configuration."""

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from spmd_serve.channel.plan import check_backend
from spmd_serve.commands import elastic
from spmd_serve.config.flags import AUTO, PreparsedArgs
from spmd_serve.errors import UsageError
from spmd_serve.job.job import Job
from spmd_serve.rendezvous.model_identity import DIRECTORY, NO_WEIGHTS
from spmd_serve.system.network import host_name
from spmd_serve.topology import Layout


def agree(
    job: Job, early: PreparsedArgs, more_flags: Callable[[argparse.ArgumentParser], None] | None = None
) -> tuple[argparse.Namespace, Layout]:
    """Parse by vLLM's parser, fix the sizes, and compare everything that must not differ between ranks.

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
    """TP, PP and DP of this round. Raises UsageError where they do not make the world that is here."""
    cluster = job.membership.cluster
    tp, pp, dp = (sizes[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data"))
    if dp != AUTO:
        return Layout.resolve(cluster.ranks_per_node, tp, pp, dp, hostnames=cluster.hostnames)
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
    """Raises UsageError for what is meant as a directory and is none here (it would be asked of the hub)."""
    path = os.path.expanduser(model)
    if model.startswith(("/", "./", "../", "~")) and not os.path.exists(path):
        raise UsageError(
            f"--model {model} does not exist on {host_name()}: every node needs the model at the same path"
        )


def engine_config(job: Job, args: argparse.Namespace) -> Any:
    """Let vLLM check everything that it can check without loading (heads and TP, lengths, quantization…)."""
    from spmd_serve.engine import vllm_compat
    from spmd_serve.engine.config import apply_executor
    from spmd_serve.engine.config import engine_config as build

    config = None
    with job.voting("the engine's configuration"):
        vllm_compat.check()
        apply_executor(args)
        config = build(args)
    return config
