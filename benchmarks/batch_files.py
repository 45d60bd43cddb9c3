"""Speed and memory of `spmd_serve batch`'s file handling alone: an engine that answers at once, real files.

    python benchmarks/batch_files.py --lines 200000 --dir /fast/disk

Prints lines/s of a first run, of a rerun that finds all done, and of one that sorts, and what memory grew by.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spmd_serve.batch import BatchLine, BatchOptions, run_batch
from spmd_serve.errors import ExitCode

PROMPT = "Once upon a time there was a file with a great many lines. " * 4
TEXT = "And every one of them got its answer, and none of them got two. " * 8
WARM_AFTER = 0.1
"""Part of the lines after which memory counts as growth."""


@dataclass
class Figures:
    """Speeds in lines a second, sizes in MB."""

    lines: int
    input_mb: float
    run_per_s: float
    rerun_per_s: float
    sort_per_s: float
    rss_warm_mb: float
    rss_grown_mb: float


class Engine:
    """Answers at once, out of order."""

    def __init__(self, lines: int) -> None:
        self.asked = 0
        self.warm_mb = self.most_mb = 0.0
        self._warm_at = max(int(lines * WARM_AFTER), 1)

    async def __call__(self, line: BatchLine) -> dict[str, Any]:
        self.asked += 1
        if self.asked == self._warm_at:
            self.warm_mb = rss_mb()
        if self.asked % 1000 == 0:
            self.most_mb = max(self.most_mb, rss_mb())
        for _ in range(self.asked % 3):
            await asyncio.sleep(0)
        choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 60, "completion_tokens": 120, "total_tokens": 180}
        body = {
            "id": f"chatcmpl-{line.number}",
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage,
        }
        response = {"status_code": 200, "request_id": f"vllm-batch-{line.number}", "body": body}
        return {"id": f"vllm-{line.number}", "custom_id": line.custom_id, "response": response, "error": None}


def measure(lines: int, folder: Path, window: int = 512) -> Figures:
    """Write an input of so many lines, answer it, answer it again, sort it."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("w") as stream:
        for number in range(lines):
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number}: {PROMPT}"}]}
            row = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            stream.write(json.dumps(row) + "\n")
    engine = Engine(lines)
    took = []
    for ordered in (False, False, True):
        options = BatchOptions(
            input_file=str(source), output_file=str(out), max_in_flight=window, ordered=ordered
        )
        began = time.perf_counter()
        code = asyncio.run(run_batch(engine, options, say=lambda text: None))
        took.append(time.perf_counter() - began)
        if code != ExitCode.OK or engine.asked != lines:
            raise AssertionError(f"exit code {code}, {engine.asked} lines asked of {lines}")
    numbers = [line.split(b'"', 8)[7] for line in out.open("rb")]
    assert numbers == [b"request-%d" % number for number in range(lines)]
    return Figures(
        lines=lines,
        input_mb=source.stat().st_size / 1e6,
        run_per_s=lines / took[0],
        rerun_per_s=lines / took[1],
        sort_per_s=lines / took[2],
        rss_warm_mb=engine.warm_mb,
        rss_grown_mb=engine.most_mb - engine.warm_mb,
    )


def rss_mb() -> float:
    """Memory of this process now."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--window", type=int, default=512, help="lines in flight")
    parser.add_argument("--dir", default=None, help="where files go (default: the temporary directory)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        figures = measure(arguments.lines, Path(folder), arguments.window)
    if arguments.json:
        json.dump(asdict(figures), sys.stdout)
        return
    print(f"{figures.lines:,} lines, {figures.input_mb:.0f} MB of input")
    print(f"first run: {figures.run_per_s:,.0f} lines/s")
    print(f"rerun with nothing to do: {figures.rerun_per_s:,.0f} lines/s")
    print(f"rerun that sorts the output: {figures.sort_per_s:,.0f} lines/s")
    print(f"memory: {figures.rss_warm_mb:.1f} MB when warm, grew by {figures.rss_grown_mb:.1f} MB")


if __name__ == "__main__":
    main()
