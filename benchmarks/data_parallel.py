"""Replicas: what two give beside one and beside stock vLLM's, and what the drivers cost as they get more.

    python -m benchmarks.data_parallel MODEL

First the throughput of one replica, of `-dp 2`, and of stock vLLM's `-dp 2`: all are started once and stay;
in every round each has its turn with the same prompts, in the order A B C, C B A, …, while the others'
processes are stopped. Then the CPU time of all that is no rank (API server, engine cores, coordinator), per
request, with 1, 2 and 4 replicas and the same load on each replica.
"""

import argparse
import ctypes
import json
import os
import shlex
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks import load, machine
from benchmarks.load import Load, LoadError, Shape
from benchmarks.machine import cpu_seconds
from benchmarks.servers import Running, ServerFailed, end_all_children
from benchmarks.sides import FLAGS, PATIENT, Launch, stock_entry, torchrun
from benchmarks.sides import Layout as SideLayout
from harness.ports import free_port
from harness.processes import Process, descendants, look
from harness.torchrun import plain_environ

PR_SET_CHILD_SUBREAPER = 36
PAUSE_S = 2.0
START_S = 600.0
ROUND_S = 300.0


@dataclass(frozen=True)
class Asked:
    """The command line."""

    model: str
    rounds: int
    clients: int
    prompt: int
    output: int
    requests: int
    replicas: tuple[int, ...]
    vocabulary: int
    out: Path

    def shape(self, replicas: int) -> Shape:
        """The load on so many replicas: `clients` each."""
        return Shape(self.clients * replicas, self.prompt, self.output, self.requests)


def main() -> int:
    """Prints the medians, and writes every round to `--out`."""
    asked = read()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to this process
    asked.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, object] = {
        "machine": machine.describe(),
        "options": vars(asked) | {"out": str(asked.out)},
    }
    try:
        result["throughput"] = throughput(asked)
        result["drivers"] = drivers(asked)
    except (ServerFailed, LoadError) as problem:
        print(f"failed: {problem}", file=sys.stderr)
        return 1
    finally:
        end_all_children()
        (asked.out / "data_parallel.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


def throughput(asked: Asked) -> dict[str, list[float]]:
    """Output tokens/s by side and round, all with the load of two replicas."""
    sides: dict[str, Callable[[], Running]] = {
        "one replica": lambda: ours(asked, 1),
        "-dp 2": lambda: ours(asked, 2),
        "stock vLLM -dp 2": lambda: stock(asked, 2),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    with ExitStack() as stack:
        standing = {}
        for name, start in sides.items():
            standing[name] = stack.enter_context(start())
            standing[name].wait_ready(START_S)
            drive(asked, standing[name], 2, "warm")
            standing[name].freeze()
        for number in range(asked.rounds):
            for name in list(sides) if number % 2 == 0 else reversed(sides):
                server = standing[name]
                server.thaw()
                server.ask()
                time.sleep(PAUSE_S)
                answered = drive(asked, server, 2, f"round {number}")
                server.freeze()
                found[name].append(answered.measures["output tokens/s"])
                print(f"round {number + 1}, {name}: {found[name][-1]:.1f} tokens/s", file=sys.stderr)
    reference = found["one replica"]
    print("\n| side | output tokens/s, median [least to most] | beside one replica, median of the rounds |")
    print("|---|---|---|")
    for name, values in found.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(values, reference, strict=True))
        spread = f"[{min(values):.1f} to {max(values):.1f}]"
        print(f"| {name} | {statistics.median(values):.1f} {spread} | {ratio:.2f} |")
    return found


def drivers(asked: Asked) -> dict[int, list[float]]:
    """CPU milliseconds per request of all that is no rank, by number of replicas and round."""
    found: dict[int, list[float]] = {}
    for replicas in asked.replicas:
        with ours(asked, replicas) as server:
            server.wait_ready(START_S)
            drive(asked, server, replicas, "warm")
            hosts = driver_processes(server)
            found[replicas] = []
            for number in range(asked.rounds):
                time.sleep(PAUSE_S)
                before = sum(map(cpu_seconds, hosts))
                answered = drive(asked, server, replicas, f"round {number}")
                used = sum(map(cpu_seconds, hosts)) - before
                found[replicas].append(1000 * used / len(answered.texts))
                print(f"{replicas} replicas: {found[replicas][-1]:.1f} ms per request", file=sys.stderr)
    print("\n| replicas | drivers' CPU, ms per request, median [least to most] | per replica |")
    print("|---|---|---|")
    for replicas, values in found.items():
        median = statistics.median(values)
        spread = f"[{min(values):.1f} to {max(values):.1f}]"
        print(f"| {replicas} | {median:.1f} {spread} | {median / replicas:.1f} |")
    return found


def driver_processes(server: Running) -> list[Process]:
    """The API server and everything below it."""
    with urllib.request.urlopen(f"{server.url}/topology", timeout=10) as answer:
        members = json.load(answer)["members"]
    pid = next(int(member["pid"]) for member in members if member["kind"] == "api")
    api = look(pid)
    assert api is not None
    return [api, *descendants(pid)]


def drive(asked: Asked, server: Running, replicas: int, seed: str) -> Load:
    """One round with prompts that are new to the server, the same for every server."""
    shape = asked.shape(replicas)
    prompts = shape.prompts(seed, range(asked.vocabulary))
    return uvloop.run(load.drive(server.port, asked.model, prompts, shape, ROUND_S))


def ours(asked: Asked, replicas: int) -> Running:
    """One rank a replica, one endpoint with one API server."""
    port = free_port()
    launcher = torchrun(SideLayout(f"dp{replicas}", tp=replicas, pp=1), 0)
    command = [*launcher, "-m", "spmd_serve", asked.model, *PATIENT, *flags(port, replicas)]
    return Running(f"dp{replicas}", [Launch(command, environ(asked))], port, asked.model, log(asked, "ours"))


def stock(asked: Asked, replicas: int) -> Running:
    """vLLM's own server, each replica on a core of its own where there are enough."""
    port = free_port()
    command = [sys.executable, *stock_entry(headless=False), "--model", asked.model, *flags(port, replicas)]
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(map(str, cores[:replicas])) if len(cores) >= replicas else "nobind"
    variables = environ(asked) | {"VLLM_CPU_OMP_THREADS_BIND": bound}
    return Running(f"mp{replicas}", [Launch(command, variables)], port, asked.model, log(asked, "stock"))


def flags(port: int, replicas: int) -> Sequence[str]:
    own = ["--host", "127.0.0.1", "--port", str(port), "-tp", "1", "-pp", "1", "-dp", str(replicas)]
    return [*own, "--api-server-count", "1", *shlex.split(FLAGS["cpu"])]


def environ(asked: Asked) -> dict[str, str]:
    local = {"HF_HUB_OFFLINE": "1"} if Path(asked.model).is_dir() else {}
    return plain_environ(VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", **local)


def log(asked: Asked, side: str) -> Path:
    return asked.out / f"{side}-{time.monotonic_ns()}.log"


def read() -> Asked:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=4, help="of each replica")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=6, help="of each client and round")
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 2, 4], help="whose drivers are measured"
    )
    parser.add_argument("--vocabulary", type=int, default=256, help="prompts are of token ids below it")
    parser.add_argument("--out", type=Path, default=Path("/tmp/spmd-data-parallel"), help="rounds and logs")
    asked = parser.parse_args()
    return Asked(**vars(asked) | {"replicas": tuple(asked.replicas)})


if __name__ == "__main__":
    sys.exit(main())
