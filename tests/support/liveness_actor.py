"""A remote-controlled process of a job: reads JSON commands on stdin, answers on stdout, has a `WatcherLink`.

Run as `python -m tests.support.liveness_actor`; its other end is `tests.support.liveness.Actor`.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from spmd_serve.liveness import End, RootCause, WatchConfig, WatcherLink, start_watcher
from spmd_serve.liveness.client import end_process
from spmd_serve.system.process import die_with_parent_in_children

_writing = threading.Lock()


def send(line: dict[str, Any]) -> None:
    """Send one line to the test."""
    with _writing:
        os.write(1, json.dumps(line).encode() + b"\n")


class Commands:
    """Each public method is a command."""

    link: WatcherLink

    def start_watcher(self, agent_pid: int, restart_count: int, options: dict[str, Any]) -> str:
        return start_watcher(agent_pid, restart_count, **options)

    def connect(self, address: str, hello: dict[str, Any], deadline_s: float, default_callback: bool) -> int:
        def on_root_cause(root_cause: RootCause) -> None:
            send({"event": "root_cause", "at": time.monotonic(), **root_cause.to_json()})

        def on_drain(reason: str) -> None:
            send({"event": "drain", "at": time.monotonic(), "reason": reason})

        def on_end(end: End) -> None:
            send({"event": "end", "at": time.monotonic(), "code": end.code, "unserved": end.unserved})

        self.link = WatcherLink.connect(
            address, hello, deadline_s, end_process if default_callback else on_root_cause, on_drain, on_end
        )
        return self.link.watcher_pid

    def link_call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return getattr(self.link, name)(*args, **kwargs)

    def announce_end(self, end: dict[str, Any], timeout_s: float) -> bool:
        return self.link.announce_end(End(**end), timeout_s)

    def configure(self, config: dict[str, Any]) -> None:
        self.link.configure(WatchConfig.from_json(config))

    def entry(self, name: str, args: list[Any]) -> None:
        getattr(self.link.entry, name)(*args)

    def turn_forever(self, every_s: float) -> None:
        def turn() -> None:
            while True:
                self.link.entry.turn()
                time.sleep(every_s)

        threading.Thread(target=turn, daemon=True).start()

    def hold_gil(self, for_s: float) -> None:
        """Sleep while no other Python thread of this process can run."""
        ctypes.PyDLL(None).usleep(int(for_s * 1e6))

    def burn_holding_gil(self, for_s: float) -> None:
        """The same, but busy: one call into C after the other, without a thread switch between them."""
        sys.setswitchinterval(1000)
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            sum(range(1_000_000))
        sys.setswitchinterval(0.005)

    def fork_child(self, dies_with_parent: bool = True) -> int:
        """Fork a child that inherits everything, tries to use the parent's link, and sleeps."""
        if dies_with_parent:
            die_with_parent_in_children()
        child = os.fork()
        if child == 0:
            self.link.failed("a forked child must not send on its parent's link")
            self.link.entry.step_begin()
            time.sleep(60)
            os._exit(0)
        return child

    def reset_stacks_signal(self) -> None:
        """Reset the signal handler, as a forked child of a member may."""
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)

    def fail_and_exit(self, cause: str, peer: bool, code: int) -> None:
        """Report the error and exit at once."""
        self.link.failed(cause, peer=peer)
        os._exit(code)

    def exit(self, code: int) -> None:
        os._exit(code)

    def crash(self) -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)


def main() -> None:
    """Run commands until stdin ends."""
    commands = Commands()
    for line in sys.stdin:
        name, args = json.loads(line)
        try:
            send({"answer": getattr(commands, name)(*args)})
        except Exception as problem:
            send({"problem": f"{type(problem).__name__}: {problem}"})


if __name__ == "__main__":
    main()
