"""A process that multiprocessing spawns below a child ends with that child."""

import subprocess
import sys
from pathlib import Path

from harness.processes import assert_gone, look

PARENT = """
import multiprocessing, os, sys
sys.path.insert(0, {root!r})
from parent.child import run
from spmd_serve.job.spawn_main import be_main_of_spawned

if __name__ == "__main__":
    be_main_of_spawned()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=run, args=(theirs,))
    child.start()
    if "leave" not in sys.argv:
        ours.recv()
    print(child.pid, flush=True)
    if "leave" in sys.argv:
        os._exit(0)
    child.join()
"""
CHILD = """
import contextlib, time

def run(pipe):
    with contextlib.suppress(BrokenPipeError):
        pipe.send("it runs")
    time.sleep(600)
"""


def command(tmp_path: Path) -> list[str]:
    package = tmp_path / "parent"
    package.mkdir()
    (package / "__main__.py").write_text(PARENT.format(root=str(Path(__file__).parents[3])))
    (package / "child.py").write_text(CHILD)
    return [sys.executable, "-m", "parent"]


def test_it_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = look(int(parent.stdout.readline()))
            assert child is not None and child.parent == parent.pid
        finally:
            parent.kill()
    assert_gone([child], 10.0)


def test_it_dies_with_a_parent_that_ended_before_it_could_ask_for_that(tmp_path: Path) -> None:
    done = subprocess.run(
        [*command(tmp_path), "leave"], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    child = look(int(done.stdout))
    assert_gone([child] if child is not None else [], 10.0)
