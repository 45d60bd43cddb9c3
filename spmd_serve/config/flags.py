"""Our own flags, each default written once; everything else goes to vLLM's parser untouched."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn

from spmd_serve.config import config_file
from spmd_serve.config.endpoints import KINDS
from spmd_serve.errors import UsageError

SUBCOMMANDS = ("serve", "batch")

CONTROL_BACKENDS = ("auto", "gloo", "nccl")

AUTO = "auto"
"""The value of ``--data-parallel-size`` that stands for "what is left"."""


def _flag(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True)
class Flags:
    """What spmd_serve itself is told; the fields are the flags (``join_timeout`` is ``--join-timeout``).

    Durations are seconds.
    """

    head: str | None = _flag(
        None, "host that serves HTTP and holds rank 0 (default: the host of the rendezvous endpoint)"
    )
    interface: str | None = _flag(
        None, "network interface for all traffic between hosts (default: the one that routes to the master)"
    )
    join_timeout: float = _flag(300.0, "seconds to wait for all ranks to join", type=float)
    control_backend: str = _flag(
        "auto",
        "how batches reach the ranks: auto (gloo between hosts, shared memory inside a host), "
        "gloo or nccl (flat, to every rank)",
        choices=CONTROL_BACKENDS,
    )
    control_key_file: str | None = _flag(
        None, "file with a shared secret: control frames are then authenticated (HMAC-SHA256)"
    )
    control_allow_class: tuple[str, ...] = _flag(
        (),
        "module:Class that control messages may carry beside vLLM's own; may be repeated",
        action="append",
        parsed_default=None,
    )
    rank_timeout: float = _flag(
        10.0, "seconds within which a stopped rank or a silent host is known to be lost", type=float
    )
    step_timeout: float = _flag(
        300.0, "seconds without progress after which a step or a busy engine core counts as hung", type=float
    )
    lb: str = _flag(
        "internal",
        "data parallel: one endpoint for all replicas (internal, the default), one on every node that holds "
        "a replica's first rank (hybrid), or one for each replica (external)",
        choices=KINDS,
        parsed_default=None,
    )
    probe_port: int | None = _flag(
        None, "port on every node for /live, /ready and /metrics (default: none)", type=int
    )

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add one argument per field to `parser`, in a group of its own."""
        group = parser.add_argument_group("spmd_serve", "flags of spmd_serve itself")
        for item in fields(cls):
            more = dict(item.metadata)
            assert item.default is not MISSING
            more["default"] = more.pop("parsed_default", item.default)
            group.add_argument("--" + item.name.replace("_", "-"), dest=item.name, **more)

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> "Flags":
        """Take our fields out of a parsed namespace; refuses values that cannot work."""
        values = {item.name: getattr(namespace, item.name) for item in fields(cls)}
        values["control_allow_class"] = tuple(values["control_allow_class"] or ())
        values["lb"] = _kind_of_lb(namespace)
        flags = cls(**values)
        for name in ("join_timeout", "rank_timeout", "step_timeout"):
            if getattr(flags, name) <= 0:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be above 0 seconds, got {getattr(flags, name)}"
                )
        if flags.probe_port is not None and not 0 <= flags.probe_port <= 65535:
            raise UsageError(f"--probe-port must be a port number (0 to 65535), got {flags.probe_port}")
        return flags


VLLMS_LB: Mapping[str, str] = {
    "data_parallel_external_lb": "external",
    "data_parallel_hybrid_lb": "hybrid",
}
"""vLLM's own flags for what ``--lb`` says."""


def _kind_of_lb(namespace: argparse.Namespace) -> str:
    """What ``--lb``, or one of vLLM's flags in its place, asks for; UsageError where two contradict."""
    asked = {f"--lb {namespace.lb}": namespace.lb} if namespace.lb is not None else {}
    for name, kind in VLLMS_LB.items():
        if getattr(namespace, name, None):
            asked["--" + name.replace("_", "-")] = kind
    if len(set(asked.values())) > 1:
        raise UsageError(f"{' and '.join(asked)} contradict each other: give one of them")
    return next(iter(asked.values()), "internal")


def port_list(text: str) -> tuple[int, ...]:
    """ "8000" or "8000,8001" as numbers, for argparse. Raises ArgumentTypeError naming the value."""
    try:
        ports = tuple(int(part) for part in text.split(","))
    except ValueError:
        ports = ()
    if not ports or not all(0 <= port <= 65535 for port in ports):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no port (0 to 65535), nor several with commas between them"
        )
    if len(set(ports)) < len(ports):
        raise argparse.ArgumentTypeError(f"{text!r} names a port twice")
    return ports


@dataclass(frozen=True)
class PreparsedArgs:
    """What must be known before vLLM is imported: our flags, the subcommand and the HTTP address."""

    flags: Flags
    subcommand: str
    rest: tuple[str, ...]
    """The command line after the subcommand, ``--config`` as it was given."""
    host: str | None
    ports: tuple[int, ...]
    """``--port``: the first port of each host, or one for each of a host's endpoints."""
    uds: str | None
    wants_help: bool
    wants_version: bool


class _Preparser(argparse.ArgumentParser):
    """Reads our flags out of a command line that also holds vLLM's."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the flags)")


def normalise(argv: Sequence[str]) -> list[str]:
    """Write flags with dashes, as vLLM's parser accepts both ``--join_timeout`` and ``--join-timeout``."""
    done = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        done.append(word)
    return done


def preparse(argv: Sequence[str]) -> PreparsedArgs:
    """Read the command line, and the file that ``--config`` names, without vLLM.

    Raises UsageError for a bad value of one of our flags, or such a file.
    """
    words = list(argv)
    subcommand = "serve"
    if words and words[0] in SUBCOMMANDS:
        subcommand = words.pop(0)
    parser = _Preparser(add_help=False, allow_abbrev=False)
    Flags.add_to(parser)
    parser.add_argument("--host", default=None)
    parser.add_argument("--port", type=port_list, default=(8000,))
    parser.add_argument("--uds", default=None)
    # Not to be taken for a short form of one of the next two.
    parser.add_argument("--data-parallel-size", "-dp")
    parser.add_argument("--data-parallel-external-lb", "-dpe", action=argparse.BooleanOptionalAction)
    parser.add_argument("--data-parallel-hybrid-lb", "-dph", action=argparse.BooleanOptionalAction)
    parser.add_argument("--version", action="store_true")
    expanded = config_file.expand(words, parser)
    namespace, _ = parser.parse_known_args(normalise(expanded))
    return PreparsedArgs(
        flags=Flags.from_namespace(namespace),
        subcommand=subcommand,
        rest=tuple(words),
        host=namespace.host,
        ports=namespace.port,
        uds=namespace.uds,
        wants_help=any(word in ("-h", "--help") or word.startswith("--help=") for word in words),
        wants_version=namespace.version,
    )


TORCHRUN_OWNS: Mapping[str, str] = {
    "nnodes": "torchrun --nnodes",
    "node_rank": "torchrun --node-rank",
    "master_addr": "torchrun --rdzv-endpoint (or --master-addr)",
    "master_port": "torchrun --rdzv-endpoint (or --master-port)",
}

REFUSED: Mapping[str, str] = {
    "headless": "run the same command on every node: only the head node opens the HTTP port",
    "distributed_executor_backend": "leave it out: torchrun's ranks are the executor",
    "ray_workers_use_nsight": "leave it out: there is no Ray here",
    "data_parallel_rank": "leave it out: a rank's replica follows from torchrun's layout (--lb external)",
    "data_parallel_start_rank": "leave it out: a node's replicas follow from torchrun's layout (--lb hybrid)",
    "data_parallel_size_local": "leave it out: a node's replicas follow from torchrun's layout",
    "data_parallel_address": "leave it out: the address is that of the head node (--head, --interface)",
    "data_parallel_rpc_port": "leave it out: the port is chosen by the kernel",
    "data_parallel_multi_port_external_lb": "write --lb external: endpoints of one host take ports in a row",
    "prefill_context_parallel_size": "leave it out: ranks are laid out as TP x PP x DP only",
    "grpc": "spmd_serve serves HTTP only; leave it out",
    "numa_bind": "leave it out: torchrun --numa-binding binds the ranks it starts",
    "enable_elastic_ep": "leave it out: torchrun's elastic node counts (--nnodes MIN:MAX) take its place",
}


def refuse(given: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Refuse vLLM flags that contradict torchrun. Raises UsageError saying what to write instead."""
    for name, value in given.items():
        if name not in defaults or value == defaults[name]:
            continue
        flag = "--" + name.replace("_", "-")
        if name in TORCHRUN_OWNS:
            raise UsageError(f"{flag} contradicts torchrun: write {TORCHRUN_OWNS[name]} instead")
        if name in REFUSED:
            raise UsageError(f"{flag} cannot be used under torchrun: {REFUSED[name]}")
    if given.get("data_parallel_backend") not in (None, "mp"):
        raise UsageError(
            "--data-parallel-backend: only mp makes sense here; leave it out (no Ray under torchrun)"
        )
    if given.get("mm_processor_cache_type") == "shm":
        raise UsageError("--mm-processor-cache-type shm needs ranks forked by the server: write lru instead")
