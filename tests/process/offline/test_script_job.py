"""The ranks of a script end together: real torchrun, real processes, no vLLM."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import descendants
from harness.server import Server
from harness.torchrun import plain_environ, torchrun_command
from harness.waiting import wait_until
from tests.support.footprint import Footprint
from tests.support.job import ROOT

DEADLINE_S = 60.0
MODULE = "tests.support.script_job"


def run(what: str, log: Path, ranks: int = 2) -> tuple[int, str]:
    """The exit code and everything printed; whatever happens, nothing may be left."""
    command = torchrun_command(ranks, [what], module=MODULE)
    server = Server(command, log, environ=plain_environ(PYTHONPATH=str(ROOT)))
    with server:
        wait_until(lambda: len(descendants(server.pid)) > ranks or server.returncode is not None, 30, "ranks")
        footprint = Footprint.of(server.pid)
        code = server.wait_exit(DEADLINE_S)
        footprint.assert_gone(5.0)
    return code, server.text()


def own_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("spmd_serve")]


@pytest.mark.parametrize("what", ["end", "end_early", "numbers"])
def test_a_normal_end(what: str, tmp_path: Path) -> None:
    code, text = run(what, tmp_path / "log")
    assert code == 0, text
    assert "rank 0 is done" in text and "rank 1 is done" in text
    assert own_lines(text) == []
    assert "leaked" not in text and "Traceback" not in text


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_ends_all_ranks_with_it(rank: int, tmp_path: Path) -> None:
    code, text = run(f"raise_on_{rank}", tmp_path / "log")
    assert code == 1
    assert "is done" not in text
    assert text.count("ValueError: two words\n") >= 1  # Python's own traceback
    (line,) = own_lines(text)
    assert line.startswith(f"spmd_serve watcher: the job has failed: rank {rank} (pid ")
    assert line.endswith("): ValueError: two words")
    assert "has not ended by itself" not in text


def test_a_sys_exit_with_a_code_ends_all_ranks_with_it(tmp_path: Path) -> None:
    """Though the script has an LLM open, whose end would wait for the others, which are busy elsewhere."""
    code, text = run("exit_on_1", tmp_path / "log")
    assert code == 1
    assert re.search(r"exitcode *: 3 ", text), text
    (line,) = own_lines(text)
    assert line.startswith("spmd_serve watcher: the job has failed: rank 1 (pid ")
    assert line.endswith("): sys.exit(3)")


def test_a_sys_exit_that_is_caught_or_means_success(tmp_path: Path) -> None:
    code, text = run("exit_caught", tmp_path / "log")
    assert code == 0, text
    assert text.count("caught 3") == 2 and own_lines(text) == []


def test_a_system_exit_without_sys_exit_is_seen_by_torchrun_alone(tmp_path: Path) -> None:
    code, text = run("exit_raised", tmp_path / "log")
    assert code == 1 and re.search(r"exitcode *: 3 ", text), text
    assert own_lines(text) == []


def test_functions_registered_with_atexit_run_after_an_exception(tmp_path: Path) -> None:
    code, text = run("slow_handler", tmp_path / "log")
    assert code == 1 and "handler ran" in text


def test_what_was_printed_before_is_not_lost(tmp_path: Path) -> None:
    assert "output of rank 0" in run("unflushed", tmp_path / "log")[1]


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    code, text = run("killed", tmp_path / "log")
    assert code == 1
    assert own_lines(text)[-1].endswith(") was killed by SIGKILL")


def test_ctrl_c_is_the_scripts_to_catch(tmp_path: Path) -> None:
    code, text = run("interrupt", tmp_path / "log")
    assert code == 0 and text.count("caught") == 2


def test_an_interrupt_that_nobody_catches(tmp_path: Path) -> None:
    code, text = run("interrupt_on_1", tmp_path / "log")
    assert code == 1
    assert own_lines(text)[-1].endswith("): KeyboardInterrupt")


@pytest.mark.parametrize("what", ["fork", "thread"])
def test_what_is_no_failure_of_the_script(what: str, tmp_path: Path) -> None:
    code, text = run(what, tmp_path / "log")
    assert code == 0, text
    assert own_lines(text) == []


def test_without_torchrun_and_twice_at_once() -> None:
    """Two scripts of one shell have a watcher each; exit codes are the scripts' own."""
    environ = plain_environ(PYTHONPATH=str(ROOT))
    started = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, what], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True
        )
        for what in ("end", "exit_7", "raise_on_0")
    ]
    ended = [(one.wait(DEADLINE_S), one.communicate()[1]) for one in started]
    assert [code for code, _ in ended] == [0, 7, 1]
    assert ended[0][1] == ended[1][1] == ""
    assert "ValueError: two words" in ended[2][1]
