"""The job's news, as this host's watcher tells them to an API server: draining, the verdict, the end."""

import asyncio
import itertools
import socket
import time
from contextlib import suppress
from typing import Any

from spmd_serve.liveness import RootCause
from spmd_serve.liveness.status import socket_name
from spmd_serve.server.admission import AdmissionControl
from spmd_serve.wire.lines import MAX_LINE, BadLine, pack, unpack

FAILED = "This server has failed and is about to end (see /health); try again later."
DRAINING = "This server is shutting down and takes no new requests; try again later."
CUT = "This server is shutting down, and the time for running requests is over; try again later."
VIEW_TIMEOUT_S = 2.0


class JobEvents:
    """Follows the watcher for as long as this process lives, and works the gate accordingly."""

    def __init__(self, admission: AdmissionControl, drain_s: float) -> None:
        """`drain_s`: how long running requests may go on once the job is to end, seconds."""
        self.root_cause: RootCause | None = None
        self.draining: str | None = None
        self._admission = admission
        self._drain_s = drain_s
        self._has_ended = False
        self._judged = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def follow(self, watcher: str) -> None:
        """Connect to the watcher at this address, and be known to it. Raises OSError where there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.connect(socket_name(watcher))  # by ourselves: uvloop takes no abstract addresses
        sock.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE)
        self._writer.write(pack({"t": "follow", "drain_s": self._drain_s}))
        self._admission.on_empty = self._all_done
        await reader.readline()  # its welcome
        self._task = asyncio.create_task(self._read(reader))

    async def view(self) -> dict[str, Any]:
        """The job as the watcher sees it. Raises OSError: it is gone, or has not answered in time."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        if self._writer is None or self._task.done():
            raise ConnectionResetError("it is gone")
        self._asked[number] = answer
        try:
            self._writer.write(pack({"t": "view", "id": number}))
            return await asyncio.wait_for(answer, VIEW_TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(f"no answer within {VIEW_TIMEOUT_S:g} s") from None
        finally:
            del self._asked[number]

    async def judged(self, timeout_s: float) -> None:
        """Return when there is a verdict, or after `timeout_s` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._judged.wait(), timeout_s)

    async def close(self) -> None:
        """Follow no more."""
        self._has_ended = True
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._hear(unpack(line))
        except (OSError, ValueError, KeyError, BadLine):
            pass
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("it is gone"))
        if self.root_cause is None and not self._has_ended:
            self._fail(RootCause("the watcher of this host is gone", None, socket.gethostname(), time.time()))

    def _hear(self, message: dict[str, object]) -> None:
        kind = message["t"]
        if kind == "reply":
            answer, view = self._asked.get(int(str(message["id"]))), message["view"]
            if answer is not None and not answer.done() and isinstance(view, dict):
                answer.set_result(view)
        elif kind == "root_cause":
            root_cause = message["root_cause"]
            assert isinstance(root_cause, dict)
            self._fail(RootCause.from_json(root_cause))
        elif kind == "drain" and self.draining is None and self.root_cause is None:
            self.draining = str(message["reason"])
            self._admission.shut(DRAINING)
            asyncio.get_running_loop().call_later(self._drain_s, self._admission.cut, CUT)
        elif kind == "end":
            self._has_ended = True

    def _fail(self, root_cause: RootCause) -> None:
        self.root_cause = root_cause
        self._judged.set()
        self._admission.cut(FAILED)

    def _all_done(self) -> None:
        if self.draining is not None and self._writer is not None:
            self._writer.write(pack({"t": "drained"}))
