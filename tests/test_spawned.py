"""What multiprocessing spawns below us ends with the process that started it."""

import subprocess
import sys
from pathlib import Path

from tests.support.processes import assert_gone, look

PARENT = """
import multiprocessing, sys
sys.path.insert(0, {root!r})
from parent.child import run
from spmd_serve.spawned import be_main_of_spawned

if __name__ == "__main__":
    be_main_of_spawned()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=run, args=(theirs,))
    child.start()
    ours.recv()
    print(child.pid, flush=True)
    child.join()
"""
CHILD = """
import time

def run(pipe):
    pipe.send("it runs")
    time.sleep(600)
"""


def test_it_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    package = tmp_path / "parent"
    package.mkdir()
    (package / "__main__.py").write_text(PARENT.format(root=str(Path(__file__).parents[1])))
    (package / "child.py").write_text(CHILD)
    command = [sys.executable, "-m", "parent"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = look(int(parent.stdout.readline()))
            assert child is not None and child.parent == parent.pid
        finally:
            parent.kill()
    assert_gone([child], 2.0)
