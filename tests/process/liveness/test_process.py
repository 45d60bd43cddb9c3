"""No process outlives its parent; pidfds tell who has ended and how; the board, and forks of a member."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from spmd_serve.liveness.procfs import ProcFile, ending_of
from spmd_serve.liveness.status_table import (
    BOARD_BYTES,
    SLOTS,
    EntryReading,
    NullStatusEntry,
    StatusEntry,
    StatusTable,
)
from spmd_serve.system.process import Ending, has_ended, open_pidfd, reaped_ending, send_signal, wait_readable
from tests.support.liveness import ROOT
from tests.support.processes import Process, assert_gone, look

FAMILIES = {
    "main thread": "hook(); child()",
    "another thread": "hook(); t = threading.Thread(target=child); t.start(); t.join()",
    "by itself": "child(lambda: die_with_parent(me))",
    "whoever it is": "child(lambda: die_with_parent(None))",
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
def family(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], Process]]:
    """A parent, and its child."""
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


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES, indirect=True)
def test_a_child_dies_with_its_parent_and_not_before(family: tuple[subprocess.Popen[str], Process]) -> None:
    parent, child = family
    time.sleep(0.2)  # a thread that has forked, and has ended, takes nobody with it
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


@pytest.fixture
def board() -> Iterator[StatusTable]:
    made = StatusTable()
    yield made
    os.close(made.fd)


class TestBoard:
    def test_what_a_member_notes_is_read(self, board: StatusTable) -> None:
        number = board.take()
        assert number is not None
        assert board.read(number) == EntryReading(0, 0, "starting", 0.0, 0.0, 0.0)
        entry, before = StatusEntry(board.fd, number), time.monotonic()
        entry.state("ready")
        entry.step_begin()
        entry.step_begin()
        entry.step_end()
        reading = board.read(number)
        assert (reading.started, reading.done, reading.state) == (2, 1, "ready")
        assert before <= reading.turned_at <= reading.started_at <= reading.done_at <= time.monotonic()
        assert reading.last_sign == reading.done_at
        entry.works()
        assert before <= board.read(number).works_since <= time.monotonic()
        entry.waits()
        assert board.read(number) == reading
        for works in (False, True):  # a driver waits for a reply, in a step or between them
            assert entry.awaits(0) is works
            assert (board.read(number).awaits, board.read(number).works_since >= before) == (0, True)
            entry.replied(works)
            assert (board.read(number).awaits, board.read(number).works_since > 0.0) == (None, works)
            entry.works()
        entry.waits()
        assert board.read(number) == reading
        entry.detach()
        entry.step_end()
        assert board.read(number) == reading

    def test_slots_are_apart_zeroed_and_limited(self, board: StatusTable) -> None:
        numbers = [board.take() for _ in range(SLOTS)]
        assert len({*numbers}) == SLOTS and None not in numbers and board.take() is None
        StatusEntry(board.fd, 7).step_begin()
        assert board.read(6).started == board.read(8).started == 0
        board.give_back(7)
        assert board.take() == 7 and board.read(7).started == 0

    def test_nobody_can_cut_it(self, board: StatusTable) -> None:
        with pytest.raises(PermissionError):
            os.ftruncate(board.fd, BOARD_BYTES // 2)

    def test_noting_a_step_is_cheap(self, board: StatusTable) -> None:
        entry = StatusEntry(board.fd, 0)
        best = min(self.time_of(entry) for _ in range(5))
        print(f"step_begin + step_end: {best * 1e6:.2f} µs")
        assert best < 20e-6

    def time_of(self, entry: StatusEntry) -> float:
        start = time.perf_counter()
        for _ in range(1000):
            entry.step_begin()
            entry.step_end()
        return (time.perf_counter() - start) / 1000

    def test_the_null_slot_has_the_same_methods(self) -> None:
        for name in ("step_begin", "step_end", "works", "waits", "turn", "detach"):
            assert getattr(NullStatusEntry(), name)() is None and hasattr(StatusEntry, name)
        NullStatusEntry().state("ready")
        assert NullStatusEntry().awaits(1) is False
        NullStatusEntry().replied(True)


def test_importing_liveness_imports_nothing_heavy() -> None:
    code = (
        "import sys; import spmd_serve.liveness, spmd_serve.liveness.watcher; "
        "heavy = {'torch', 'vllm', 'asyncio', 'multiprocessing', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=20)
