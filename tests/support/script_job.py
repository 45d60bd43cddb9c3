"""A script whose ranks are one job, without vLLM: `-m tests.support.script_job WHAT`, on every rank."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from spmd_serve.config.flags import Flags
from spmd_serve.offline.script_job import ScriptJob

RANK = int(os.environ.get("RANK", "0"))
FOREVER_S = 60.0


def end(job: ScriptJob) -> None:
    """All ranks end normally, not at the same time."""
    time.sleep(0.5 * RANK)


def end_early(job: ScriptJob) -> None:
    """Rank 0 ends long before the other."""
    time.sleep(2.0 * RANK)


def raise_on_1(job: ScriptJob) -> None:
    if RANK == 1:
        raise ValueError("two words")
    time.sleep(FOREVER_S)


def raise_on_0(job: ScriptJob) -> None:
    if RANK == 0:
        raise ValueError("two words")
    time.sleep(FOREVER_S)


def slow_handler(job: ScriptJob) -> None:
    """What the script has registered with atexit runs after an exception, too."""

    def handler() -> None:
        time.sleep(0.5)
        print("handler ran", flush=True)

    atexit.register(handler)
    raise_on_1(job)


def interrupt(job: ScriptJob) -> None:
    """Ctrl-C is a KeyboardInterrupt as usual; a script that catches it goes on."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("caught", flush=True)


def interrupt_on_1(job: ScriptJob) -> None:
    if RANK == 1:
        signal.raise_signal(signal.SIGINT)
    time.sleep(FOREVER_S)


def killed(job: ScriptJob) -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def fork(job: ScriptJob) -> None:
    """A forked child that ends in any way does not affect the job."""
    pid = os.fork()
    if pid == 0:
        raise ValueError("in a child")
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def thread(job: ScriptJob) -> None:
    """An exception in a thread of the script ends that thread."""
    one = threading.Thread(target=lambda: 1 / 0)
    one.start()
    one.join()


class EndsWithOthers:
    """An LLM whose end waits for the end of the other ranks."""

    closed = False

    def await_end(self, wait_s: float | None) -> None:
        time.sleep(FOREVER_S)

    def end_with_script(self) -> None:
        time.sleep(FOREVER_S)


def exit_on_1(job: ScriptJob) -> None:
    job.opened(EndsWithOthers())
    if RANK == 1:
        sys.exit(3)
    time.sleep(FOREVER_S)


def exit_caught(job: ScriptJob) -> None:
    """A sys.exit() that the script catches, and one of success, are no failures."""
    try:
        sys.exit(3)
    except SystemExit as leaving:
        print("caught", leaving.code, flush=True)
    print(f"rank {RANK} is done", flush=True)
    sys.exit()


def exit_7(job: ScriptJob) -> None:
    sys.exit(7)


def exit_raised(job: ScriptJob) -> None:
    """Without sys.exit(), a SystemExit counts as a normal end; only torchrun sees its code."""
    raise SystemExit(3)


def unflushed(job: ScriptJob) -> None:
    """What rank 0 has printed before it is ended is not lost."""
    if RANK == 0:
        sys.stdout.write("output of rank 0\n")
    raise_on_1(job)


def numbers(job: ScriptJob) -> None:
    me = job.membership.me
    assert (me.rank, me.torchrun_rank) == (RANK, RANK)
    job.begin_round(5.0)
    first = job.membership.round_id
    job.begin_round(5.0)
    assert job.membership.round_id == f"{first}n1"
    job.vote("the second round", None)
    print("voted", flush=True)


SCRIPTS: dict[str, Callable[[ScriptJob], None]] = {
    one.__name__: one
    for one in (
        *(end, end_early, raise_on_1, raise_on_0, slow_handler, interrupt, interrupt_on_1, killed),
        *(fork, thread, exit_on_1, exit_caught, exit_7, exit_raised, unflushed, numbers),
    )
}

if __name__ == "__main__":
    SCRIPTS[sys.argv[1]](ScriptJob.of_this_process(Flags(join_timeout=30.0)))
    print(f"rank {RANK} is done", flush=True)
