"""Children end with their parent; pidfds tell that a process has ended, and how."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from harness.processes import Process, assert_gone, look
from spmd_serve.liveness.procfs import ProcFile, ending_of
from spmd_serve.system.process import Ending, has_ended, open_pidfd, reaped_ending, send_signal, wait_readable
from tests.support.liveness import ROOT

WAYS = {
    "forked by the main thread": "hook(); child()",
    "forked by another thread": "hook(); t = threading.Thread(target=child); t.start(); t.join()",
    "called in the child, parent known": "child(lambda: die_with_parent(me))",
    "called in the child, any parent": "child(lambda: die_with_parent(None))",
}

PARENT = """
import os, sys, threading, time
from spmd_serve.system.process import die_with_parent, die_with_parent_in_children
me = os.getpid()
def hook():
    die_with_parent_in_children()
    die_with_parent_in_children()
def child(first=lambda: None):
    pid = os.fork()
    if pid == 0:
        first()
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
{body}
time.sleep(60)
"""


@pytest.fixture
def parent_and_child(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], Process]]:
    code = PARENT.format(body=request.param)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = look(int(parent.stdout.readline()))
        assert child is not None
        try:
            yield parent, child
        finally:
            parent.kill()
            child.signal(signal.SIGKILL)


@pytest.mark.parametrize("parent_and_child", WAYS.values(), ids=WAYS, indirect=True)
def test_a_child_dies_with_its_parent_and_not_before(
    parent_and_child: tuple[subprocess.Popen[str], Process],
) -> None:
    parent, child = parent_and_child
    time.sleep(0.2)  # the end of the thread that has forked must not end the child
    assert child.alive()
    parent.kill()
    assert_gone([child], 10.0)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = "from spmd_serve.system.process import die_with_parent\ndie_with_parent(1)\nprint('still here')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=20)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize(
    ("code", "ending"),
    [("import os; os.kill(os.getpid(), 9)", Ending(None, 9)), ("raise SystemExit(3)", Ending(3, None))],
)
def test_how_a_process_ended(code: str, ending: Ending) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()\n" + code], stdin=subprocess.PIPE) as process:
        pidfd = open_pidfd(process.pid)
        assert pidfd is not None
        stat = ProcFile(process.pid)
        try:
            assert not has_ended(pidfd) and reaped_ending(pidfd) is None
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.close()
            assert wait_readable(pidfd, 20.0)
            assert ending_of(pidfd, stat) == ending  # a zombie
            process.wait(20)
            assert ending_of(pidfd, stat) in (ending, None)  # None: a kernel before 6.15
            assert has_ended(pidfd) and not send_signal(pidfd, signal.SIGKILL) and stat.read() is None
        finally:
            os.close(pidfd)
            stat.close()


def test_a_pid_that_is_gone_has_no_pidfd() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait(20)
    assert open_pidfd(process.pid) is None
