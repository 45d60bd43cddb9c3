"""What a wait of a CPU rank costs: gloo's all-reduce, by where its threads may run and who polls beside it.

    python -m benchmarks.wakeups [--own-sessions]

Two ranks, each bound to a core of its own, alternate between a small product and an all-reduce of 1 KiB, as a
tensor parallel step does. gloo's threads are bound to the rank's core too, or may run on both. Beside the
ranks, bound to their cores, run processes that only call sched_yield(): as what polls for a message does.
`--own-sessions`: each process in a session of its own (Linux then makes it a scheduling group of its own:
sched_autogroup), as torchrun starts ranks. Prints microseconds per round, the median of the repeats.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from spmd_serve.engine.gloo_devices import free_gloo_threads
from spmd_serve.system.process import die_with_parent

WORLD = 2
DEADLINE_S = 120.0
POLLERS: dict[str, tuple[int, ...]] = {
    "nobody polls": (),
    "one poller, on rank 0's core": (0,),
    "two pollers": (0, 1),
}
"""Beside which ranks somebody polls."""


def prepare(core: int, own_session: bool) -> None:
    """Where this process runs, and that it does not outlive its parent."""
    die_with_parent(os.getppid())
    if own_session:
        os.setsid()
    os.sched_setaffinity(0, {core})


def rank(
    number: int, cores: list[int], free: bool, meeting: str, asked: argparse.Namespace, out: Any
) -> None:
    """One rank; rank 0 hands in the microseconds per round of each repeat."""
    prepare(cores[number], asked.own_sessions)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=WORLD)
    dist.barrier()
    if free:
        free_gloo_threads(cores)
    sent, weights = torch.ones(1, 256), torch.randn(256, 1024)
    seen = []
    for _ in range(asked.repeats + 1):
        started = time.perf_counter()
        for _ in range(asked.rounds):
            sent @ weights
            dist.all_reduce(sent)
            sent.fill_(1.0)
        seen.append((time.perf_counter() - started) / asked.rounds * 1e6)
    if number == 0:
        out.put(seen[1:])
    dist.barrier()


def poll(core: int, own_session: bool, end: "Synchronized[int]") -> None:
    """Yields, and looks whether it is time to end."""
    prepare(core, own_session)
    while not end.value:
        os.sched_yield()


def measure(free: bool, pollers: tuple[int, ...], asked: argparse.Namespace) -> float:
    """Microseconds per round."""
    fork = multiprocessing.get_context("fork")
    cores = sorted(os.sched_getaffinity(0))[:WORLD]
    end, out = fork.Value("i", 0, lock=False), fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            fork.Process(target=poll, args=(cores[beside], asked.own_sessions, end), daemon=True)
            for beside in pollers
        ]
        meeting = str(Path(folder) / "meeting")
        started += [
            fork.Process(target=rank, args=(number, cores, free, meeting, asked, out), daemon=True)
            for number in range(WORLD)
        ]
        try:
            for process in started:
                process.start()
            return float(statistics.median(out.get(timeout=DEADLINE_S)))
        finally:
            end.value = 1
            for process in started:
                process.join(10.0)
                process.kill()


def main() -> int:
    """Prints one line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1500, help="of one repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--own-sessions", action="store_true", help="a session for each process")
    asked = parser.parse_args()
    if len(os.sched_getaffinity(0)) < WORLD:
        print("needs two cores", file=sys.stderr)
        return 1
    for name, pollers in POLLERS.items():
        bound, free = (measure(free, pollers, asked) for free in (False, True))
        print(f"{name}: gloo's threads bound {bound:.0f} us, free {free:.0f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
