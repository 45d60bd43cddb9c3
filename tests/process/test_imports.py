"""A rank starts without the large libraries."""

import subprocess
import sys

from tests.support.imports import ROOT


def test_a_rank_starts_without_torch() -> None:
    """The watcher is forked, and OpenMP's variables are set, before torch is there."""
    program = (
        "import sys, spmd_serve.main, spmd_serve.commands.serve, spmd_serve.job.job\n"
        "print(*{'torch', 'numpy', 'vllm', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr
