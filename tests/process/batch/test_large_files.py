"""Two hundred thousand lines and the benchmark's engine: memory stays flat, and the files keep up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.waiting import Note

LINES = 200_000
MOST_GROWTH_MB = 25
"""Ids take 18 to 36 bytes each; the lines themselves, if they were kept, would take 250 MB."""

LEAST_LINES_PER_S = 1000
"""Far below what even a busy machine does: a guard against work that grows with the file."""


@pytest.mark.slow
def test_memory_is_flat_and_files_keep_up(tmp_path: Path, note: Note) -> None:
    root = Path(__file__).parents[3]
    command = [
        sys.executable,
        "-m",
        "benchmarks.batch_files",
        "--json",
        "--lines",
        str(LINES),
        "--dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    note(f"batch files: {figures}")
    assert figures["rss_warm_mb"] > 10
    assert figures["rss_grown_mb"] < MOST_GROWTH_MB
    assert figures["run_per_s"] > LEAST_LINES_PER_S
