"""The command line of `python -m benchmarks.serving`."""

import argparse
import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.load import Shape
from benchmarks.machine import has_cuda
from benchmarks.sides import FLAGS, Device, Layout, Side, read_variable

EPILOG = """\
A flag as the value of an option needs the equals sign: --ours-args="--control-backend gloo".
A grid: name every cell as a side, e.g.
  --side mp --side "unbound mp VLLM_CPU_OMP_THREADS_BIND=nobind" \\
  --side ours --side "flat ours --control-backend gloo"
All sides are compared with the first one.
"""


@dataclass(frozen=True)
class Options:
    """What a run does; durations are seconds."""

    model: str
    layouts: list[Layout]
    sides: list[Side]
    shapes: list[Shape]
    rounds: int
    launches: int
    idle_s: float
    pause_s: float
    device: Device
    flags: str
    token_ids: range
    client: Literal["own", "vllm"]
    restart_each_round: bool
    freeze: bool
    start_deadline_s: float
    round_deadline_s: float
    out: Path

    def describe(self) -> dict[str, object]:
        """For the report: how the run was asked for."""
        return {
            "model": self.model,
            "flags of both": self.flags,
            "sides": [str(side) for side in self.sides],
            "layouts": [layout.name for layout in self.layouts],
            "shapes": [shape.__dict__ for shape in self.shapes],
            "rounds": self.rounds,
            "launches": self.launches,
            "idle seconds": self.idle_s,
            "pause before a round, seconds": self.pause_s,
            "device": self.device,
            "client": self.client,
            "between rounds": self.between_rounds(),
        }

    def between_rounds(self) -> str:
        if self.restart_each_round:
            return "started anew for each round"
        return "the others stopped (SIGSTOP)" if self.freeze else "the others idle"


def read(arguments: Sequence[str] | None = None) -> Options:
    """Parses the command line; ends the process with a usage message for what makes no sense."""
    parser = build()
    given = parser.parse_args(arguments)
    device: Device = given.device or ("cuda" if has_cuda() else "cpu")
    shapes = [
        Shape(clients, prompt, given.output_tokens, given.requests_per_client)
        for clients in given.clients
        for prompt in given.prompt_tokens
    ]
    if given.idle and not given.launches:
        parser.error("--idle is measured after a launch: it needs --launches of at least 1")
    try:
        sides = [complete(Side.read(text), given) for text in given.side or ("mp", "ours")]
        layouts = [Layout.read(name) for name in given.layout]
    except ValueError as error:
        parser.error(str(error))
    if len({side.name for side in sides}) < len(sides):
        parser.error("two sides have the same name")
    if any(side.command for side in sides) and any(layout.hosts > 1 for layout in layouts):
        parser.error("a substituted command can only serve layouts of one host")
    return Options(
        model=given.model,
        layouts=layouts,
        sides=sides,
        shapes=shapes,
        rounds=given.rounds,
        launches=given.launches,
        idle_s=given.idle,
        pause_s=given.pause,
        device=device,
        flags=FLAGS[device] if given.flags is None else given.flags,
        token_ids=range(given.token_ids or vocabulary(given.model)),
        client=given.client,
        restart_each_round=given.restart_each_round,
        freeze=not given.no_freeze,
        start_deadline_s=given.start_deadline,
        round_deadline_s=given.round_deadline,
        out=given.out or Path(tempfile.mkdtemp(prefix="serving-benchmark-")),
    )


def complete(side: Side, given: argparse.Namespace) -> Side:
    """Adds what was said for all sides of a base; a side's own variables win, its own flags come last."""
    environ: dict[str, str] = {}
    for text in getattr(given, f"{side.base}_env"):
        environ |= read_variable(text)
    words = [word for text in getattr(given, f"{side.base}_args") for word in shlex.split(text)]
    return replace(
        side,
        environ=environ | side.environ,
        arguments=(*words, *side.arguments),
        command=getattr(given, f"{side.base}_command"),
    )


def vocabulary(model: str) -> int:
    """Nine tenths of the vocabulary (special tokens are at its end); 1000 where there is no config.json."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return 1000
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 1000
    return int(size) * 9 // 10


def build() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description="Measures this server beside stock vLLM's mp executor: same model, same flags, in turn.",
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="folder or hub name")
    load = parser.add_argument_group("load").add_argument
    load("--layout", nargs="+", default=["tp2", "pp2"], help="as in tp2, pp2, tp2pp2, tp2-2hosts, two-hosts")
    load("--clients", nargs="+", type=positive, default=[1, 16], help="numbers of clients")
    load("--prompt-tokens", nargs="+", type=positive, default=[128, 1024], help="lengths of prompts")
    load("--output-tokens", type=positive, default=64, help="length of every answer")
    load("--requests-per-client", type=positive, default=4, help="in a round")
    load("--token-ids", type=positive, help="prompts draw ids below this (unset: from config.json)")
    load("--client", choices=["own", "vllm"], default="own", help="vllm: vLLM's own bench serve code")
    turns = parser.add_argument_group("turns").add_argument
    turns("--rounds", type=natural, default=5, help="of each load and side")
    turns("--launches", type=natural, default=3, help="launches of each side to time, with a look at memory")
    turns("--idle", type=float, default=0.0, help="seconds of idleness to measure after the first launch")
    turns("--pause", type=float, default=2.5, help="seconds before a round: waiting loops spin for a second")
    turns("--restart-each-round", action="store_true", help="start each server anew for each of its rounds")
    turns(
        "--no-freeze", action="store_true", help="leave the others idle instead of stopping their processes"
    )
    turns("--start-deadline", type=float, default=600.0, help="seconds until a server must be healthy")
    turns("--round-deadline", type=float, default=600.0, help="seconds that a round may take")
    sides = parser.add_argument_group("sides").add_argument
    sides(
        "--side", action="append", help="'NAME [ours|mp] [VAR=VALUE ...] [--flag ...]' (unset: mp and ours)"
    )
    sides("--device", choices=["cpu", "cuda"], help="unset: cuda where there is a GPU")
    sides("--flags", help="vLLM's flags for all sides, in place of the usual ones")
    for base in ("ours", "mp"):
        sides(f"--{base}-env", action="append", default=[], metavar="VAR=VALUE", help=f"for sides of {base}")
        sides(f"--{base}-args", action="append", default=[], metavar="FLAGS", help=f"for sides of {base}")
        sides(f"--{base}-command", metavar="COMMAND", help="in place of its command; {model} is filled in")
    parser.add_argument(
        "--out", type=Path, help="folder for report.md, rounds.json and logs (unset: a new one in /tmp)"
    )
    return parser


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults where there are any, and the epilog as it is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def natural(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return int(text)
