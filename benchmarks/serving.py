"""This server beside stock vLLM's `mp` executor: same model, same flags, same machine, in turn.

    python -m benchmarks.serving MODEL --layout tp2 pp2 two-hosts --idle 60

For every layout: first each side is launched alone several times (start-up time, memory, idle CPU time). Then
all sides are started once and stay; in every round each has its turn with the same prompts, in the order
A B, B A, …, while the others' processes are stopped. docs/benchmarks.md says how to read the result.
"""

import ctypes
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import uvloop

from benchmarks import load, machine, options, report, vllm_client
from benchmarks.load import Load, LoadError, Shape
from benchmarks.options import Options
from benchmarks.servers import Running, ServerFailed, end_all_children
from benchmarks.sides import Layout, Side, launches
from harness.ports import free_port

PR_SET_CHILD_SUBREAPER = 36
WARM_OUTPUT_TOKENS = 8


def main() -> int:
    """Runs what the command line asks for; writes what there is also where it fails in the middle."""
    asked = options.read()
    # Orphans of a server that died come to this process, so that the end finds them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, interrupt)
    asked.out.mkdir(parents=True, exist_ok=True)
    book = Book(asked)
    for name, value in book.machine.items():
        say(f"{name}: {value}")
    say(f"writing to {asked.out}")
    try:
        for layout in asked.layouts:
            Bench(asked, layout, book).run()
    except (ServerFailed, LoadError) as error:
        say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        end_all_children()
        book.write()
        print(book.page())
    return 0


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Book:
    """All that was measured, written after every step: an interrupted run keeps what it has."""

    options: Options
    machine: dict[str, str] = field(default_factory=machine.describe)
    layouts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def open(self, layout: Layout) -> dict[str, Any]:
        return self.layouts.setdefault(
            layout.name, {"launches": [], "idle": {}, "placement": {}, "commands": {}, "rounds": []}
        )

    def content(self) -> dict[str, Any]:
        names = [side.name for side in self.options.sides]
        described = self.options.describe()
        return {"names": names, "machine": self.machine, "options": described, "layouts": self.layouts}

    def page(self) -> str:
        return report.markdown(self.content())

    def write(self) -> None:
        (self.options.out / "rounds.json").write_text(json.dumps(self.content(), indent=1), encoding="utf-8")
        (self.options.out / "report.md").write_text(self.page(), encoding="utf-8")


@dataclass(frozen=True)
class Turn:
    """A round of one side: in it, the shapes that are measured without changing sides."""

    number: int
    side: Side
    shapes: tuple[Shape, ...]


def schedule(sides: Sequence[Side], shapes: Sequence[Shape], rounds: int, *, together: bool) -> list[Turn]:
    """A B, B A, A B, …: what drifts slowly then meets all sides alike. `together`: all shapes in one turn."""
    groups = [tuple(shapes)] if together else [(shape,) for shape in shapes]
    turns = []
    for group in groups:
        for number in range(rounds):
            order = sides if number % 2 == 0 else list(reversed(sides))
            turns += [Turn(number, side, group) for side in order]
    return turns


class Bench:
    """All measurements of one layout."""

    def __init__(self, asked: Options, layout: Layout, book: Book) -> None:
        self.asked = asked
        self.layout = layout
        self.book = book
        self.page = book.open(layout)
        self.texts: dict[tuple[str, int, str], list[str]] = {}

    def run(self) -> None:
        for turn in schedule(self.asked.sides, self.asked.shapes[:1], self.asked.launches, together=False):
            self.launch(turn)
            self.book.write()
        turns = schedule(
            self.asked.sides, self.asked.shapes, self.asked.rounds, together=self.asked.restart_each_round
        )
        with ExitStack() as stack:
            standing = {} if self.asked.restart_each_round or not turns else self.start_all(stack)
            for turn in turns:
                with self.awake(turn, standing) as server:
                    for shape in turn.shapes:
                        self.measure(server, turn, shape)
                self.compare_answers()
                self.book.write()

    def server(self, side: Side, purpose: str) -> Running:
        """Not yet started."""
        port = free_port()
        commands = launches(side, self.layout, self.asked.model, port, self.asked.device, self.asked.flags)
        self.page["commands"][side.name] = [
            re.sub(r"--(port|master-port) \d+", r"--\1 PORT", shlex.join(one.command)) for one in commands
        ]
        log = self.asked.out / f"{self.layout.name}-{side.name}-{purpose}.log"
        return Running(side.name, commands, port, self.asked.model, log)

    def launch(self, turn: Turn) -> None:
        """One launch of a side alone: start-up, memory, and at the first launch idleness."""
        say(f"{self.layout.name}: launch {turn.number + 1} of {turn.side.name}")
        with self.server(turn.side, f"launch{turn.number + 1}") as server:
            times = server.wait_ready(self.asked.start_deadline_s)
            self.warm(server, turn.shapes[0])
            memory = server.memory()
            if self.asked.idle_s and turn.number == 0:
                time.sleep(self.asked.pause_s)
                self.page["idle"][turn.side.name] = server.idle(self.asked.idle_s)
            stopping = time.perf_counter()
        entry = {
            "side": turn.side.name,
            "round": turn.number,
            **times,
            "pss_mib": memory["pss_mib"],
            "processes": len(memory["processes"]),
            "memory": memory["processes"],
            "stop_s": time.perf_counter() - stopping,
        }
        self.page["launches"].append(entry)
        say(f"  ready after {entry['ready_s']:.1f} s, {entry['pss_mib']:.0f} MiB")

    def start_all(self, stack: ExitStack) -> dict[str, Running]:
        """Every side, one after the other; each is stopped (SIGSTOP) once it is warm."""
        standing = {}
        for side in self.asked.sides:
            say(f"{self.layout.name}: starting {side.name}")
            server = stack.enter_context(self.server(side, "rounds"))
            server.wait_ready(self.asked.start_deadline_s)
            self.warm(server, self.asked.shapes[0])
            self.page["placement"][side.name] = server.placement()
            if self.asked.freeze:
                server.freeze()
            standing[side.name] = server
        return standing

    @contextmanager
    def awake(self, turn: Turn, standing: dict[str, Running]) -> Iterator[Running]:
        """The turn's server, running: continued for the turn, or started for it."""
        if not standing:
            with self.server(turn.side, f"round{turn.number + 1}") as server:
                server.wait_ready(self.asked.start_deadline_s)
                self.page["placement"].setdefault(turn.side.name, server.placement())
                yield server
            return
        server = standing[turn.side.name]
        if self.asked.freeze:
            server.thaw()
        server.check()
        server.ask()  # it answers again, before anything is timed
        yield server
        if self.asked.freeze:
            server.freeze()

    def warm(self, server: Running, shape: Shape) -> None:
        """One short wave of every client, once for each server and shape."""
        if shape not in server.warmed:
            server.warmed.add(shape)
            wave = Shape(shape.clients, shape.prompt_tokens, WARM_OUTPUT_TOKENS, 1)
            self.drive(server, wave, f"warm {server.name}")

    def drive(self, server: Running, shape: Shape, seed: str) -> Load:
        prompts = shape.prompts(seed, self.asked.token_ids)
        client = vllm_client.drive if self.asked.client == "vllm" else load.drive
        try:
            return uvloop.run(
                client(server.port, self.asked.model, prompts, shape, self.asked.round_deadline_s)
            )
        except LoadError as error:
            raise LoadError(f"{server.name}, {shape.name}: {error}\n{server.tails()}") from error

    def measure(self, server: Running, turn: Turn, shape: Shape) -> None:
        """One round: the server has parked its waiting loops, the prompts are new to it."""
        self.warm(server, shape)
        time.sleep(self.asked.pause_s)
        before, server_before = machine.CpuTimes.now(), server.cpu_s()
        found = self.drive(server, shape, f"round {turn.number}")
        after, server_cpu = machine.CpuTimes.now(), server.cpu_s() - server_before
        server.check()
        passed = after.when - before.when
        others = after.busy - before.busy - server_cpu - (after.own - before.own)
        tokens = len(found.texts) * shape.output_tokens
        measures = found.measures | {
            "server CPU, ms per output token": 1000 * server_cpu / tokens,
            "client CPU, % of a core": 100 * found.client_cpu_s / found.duration_s,
            "CPU of others, % of a core": 100 * max(others, 0.0) / passed,
            "CPU stolen, % of a core": 100 * (after.stolen - before.stolen) / passed,
        }
        self.texts[shape.name, turn.number, turn.side.name] = found.texts
        self.page["rounds"].append(
            {
                "shape": shape.name,
                "round": turn.number,
                "side": turn.side.name,
                "duration_s": found.duration_s,
                "answers": len(found.texts),
                "same_answers": 0,
                "measures": measures,
                "requests": found.requests,
            }
        )
        say(
            f"{self.layout.name}, {shape.name}, round {turn.number + 1}, {turn.side.name}: "
            f"{measures['output tokens/s']:.1f} tokens/s in {found.duration_s:.1f} s, "
            f"TPOT {measures['TPOT median ms']:.1f} ms, others {measures['CPU of others, % of a core']:.0f} %"
        )

    def compare_answers(self) -> None:
        """Counts the answers that are the same as the first side's in the same round."""
        first = self.asked.sides[0].name
        for one in self.page["rounds"]:
            shape, number, side = one["shape"], one["round"], one["side"]
            reference = self.texts.get((shape, number, first), [])
            pairs = zip(reference, self.texts[shape, number, side], strict=False)
            one["same_answers"] = sum(mine == theirs for theirs, mine in pairs)


if __name__ == "__main__":
    sys.exit(main())
