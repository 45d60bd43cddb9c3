"""The events of the job that this node's watcher sends to an API server: drain, root cause, normal end."""

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
DRAIN_TIMED_OUT = "This server is shutting down, and the time for running requests is over; try again later."
VIEW_TIMEOUT_S = 2.0
"""Seconds that the watcher may take to answer for /topology and /metrics."""


class JobEvents:
    """An event subscriber: follows the watcher and sets admission control accordingly."""

    def __init__(self, admission: AdmissionControl, drain_s: float) -> None:
        """`drain_s`: seconds that requests in flight may take after the job is asked to end."""
        self.root_cause: RootCause | None = None
        self.draining: str | None = None
        self._admission = admission
        self._drain_s = drain_s
        self._has_ended = False
        self._failed = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._view_ids = itertools.count(1)
        self._pending_views: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def follow(self, watcher: str) -> None:
        """Subscribe to the watcher at the address `watcher`. Raises OSError if none listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.connect(socket_name(watcher))  # not by asyncio: uvloop rejects abstract addresses
        sock.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE)
        self._writer.write(pack({"t": "follow", "drain_s": self._drain_s}))
        self._admission.on_empty = self._send_drained
        await reader.readline()  # the acknowledgement
        self._task = asyncio.create_task(self._read(reader))

    async def view(self) -> dict[str, Any]:
        """Return the watcher's view of the job. Raises OSError if it is gone or does not answer in time."""
        number, answer = next(self._view_ids), asyncio.get_running_loop().create_future()
        if self._writer is None or self._task.done():
            raise ConnectionResetError("it is gone")
        self._pending_views[number] = answer
        try:
            self._writer.write(pack({"t": "view", "id": number}))
            return await asyncio.wait_for(answer, VIEW_TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(f"no answer within {VIEW_TIMEOUT_S:g} s") from None
        finally:
            del self._pending_views[number]

    async def wait_for_root_cause(self, timeout_s: float) -> None:
        """Return when the root cause is declared, or after `timeout_s` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._failed.wait(), timeout_s)

    async def close(self) -> None:
        """End the subscription."""
        self._has_ended = True
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._on_message(unpack(line))
        except (OSError, ValueError, KeyError, BadLine):
            pass
        for answer in self._pending_views.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("it is gone"))
        if self.root_cause is None and not self._has_ended:
            self._fail(RootCause("the watcher of this host is gone", None, socket.gethostname(), time.time()))

    def _on_message(self, message: dict[str, object]) -> None:
        kind = message["t"]
        if kind == "reply":
            answer, view = self._pending_views.get(int(str(message["id"]))), message["view"]
            if answer is not None and not answer.done() and isinstance(view, dict):
                answer.set_result(view)
        elif kind == "root_cause":
            root_cause = message["root_cause"]
            assert isinstance(root_cause, dict)
            self._fail(RootCause.from_json(root_cause))
        elif kind == "drain" and self.draining is None and self.root_cause is None:
            self.draining = str(message["reason"])
            self._admission.stop_admitting(DRAINING)
            asyncio.get_running_loop().call_later(self._drain_s, self._admission.abort, DRAIN_TIMED_OUT)
        elif kind == "end":
            self._has_ended = True

    def _fail(self, root_cause: RootCause) -> None:
        self.root_cause = root_cause
        self._failed.set()
        self._admission.abort(FAILED)

    def _send_drained(self) -> None:
        if self.draining is not None and self._writer is not None:
            self._writer.write(pack({"t": "drained"}))
