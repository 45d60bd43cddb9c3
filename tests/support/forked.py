"""Functions that run in forked processes, as ranks or as torchrun's store; a start takes milliseconds."""

import contextlib
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

DEADLINE_S = 30.0


@dataclass
class Child:
    """A forked process; a pipe returns the result of its function as JSON."""

    pid: int
    _pipe: int
    _ended: bool = False

    def result(self, deadline_s: float = DEADLINE_S) -> Any:
        """Return the function's result; AssertionError if it raised, was killed, or takes too long."""
        text = self._read(deadline_s)
        assert text, f"process {self.pid} ended without a result"
        answer = json.loads(text)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def wait_killed(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until it has been killed without a result."""
        text = self._read(deadline_s)
        assert not text, f"process {self.pid} was to be killed, but returned {text}"

    def end(self) -> None:
        """Kill it and wait for its exit."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._pipe)

    def _read(self, deadline_s: float) -> str:
        end = time.monotonic() + deadline_s
        text = b""
        while True:
            ready, _, _ = select.select([self._pipe], [], [], max(end - time.monotonic(), 0))
            assert ready, f"process {self.pid} gave no answer in {deadline_s:g} s"
            part = os.read(self._pipe, 65536)
            if not part:
                return text.decode()
            text += part


class Children:
    """`with Children() as children: children.start(function)`: the end of the block ends all of them."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, function: Callable[[], object]) -> Child:
        """Fork a process that runs the function only, without the parent's clean-up code."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run(function, write)
        os.close(write)
        self._all.append(Child(pid, read))
        return self._all[-1]

    def end(self) -> None:
        """End all children."""
        for child in self._all:
            child.end()
        self._all.clear()


def _run(function: Callable[[], object], pipe: int) -> None:
    try:
        answer: dict[str, object] = {"value": function()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(pipe, "w") as file:
        json.dump(answer, file)
    os._exit(0)


@contextlib.contextmanager
def store_server() -> Iterator[tuple[Child, int]]:
    """Yield a process that serves a TCPStore, as torchrun's agent does, and its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]

    def serve() -> None:
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=DEADLINE_S),
            master_listen_fd=listener.detach(),
        )
        signal.pause()
        del store

    with Children() as children:
        server = children.start(serve)
        listener.close()
        yield server, port
