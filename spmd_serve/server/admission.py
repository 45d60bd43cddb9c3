"""Who is let in, and what those inside are told when the job fails or ends (ASGI middleware)."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_ROUTES = frozenset({"/health", "/ready", "/topology", "/metrics", "/metrics/"})
"""Answered in any state."""
RETRY_AFTER_S = 10
"""What refused clients are told: about the time that a restarted job takes to load a small model."""
_TRY_AGAIN_LATER = 1013
"""WebSocket close code (RFC 6455's registry)."""


@dataclass(eq=False)
class AdmissionControl:
    """The state that all requests share. Used in the event loop's thread only."""

    refusal: str | None = None
    """Why new requests are refused; None: they are let in."""
    engine_is_dead: Callable[[], bool] = lambda: False
    on_empty: Callable[[], None] = lambda: None
    """Called when the last request has left, while the gate is shut."""
    _inside: "set[TrackedRequest]" = field(default_factory=set)

    def why_shut(self) -> str | None:
        """What a new request is told instead of being let in."""
        if self.refusal is None and self.engine_is_dead():
            return "The engine of this server has failed (see /health); try again later."
        return self.refusal

    def shut(self, why: str) -> None:
        """Refuse new requests; those inside go on."""
        self.refusal = why
        if not self._inside:
            self.on_empty()

    def cut(self, why: str) -> None:
        """Refuse new requests, and tell those inside that this was it."""
        self.refusal = why
        for visit in self._inside:
            visit.cut(why)

    def enter(self, visit: "TrackedRequest") -> None:
        """A request that has been let in."""
        self._inside.add(visit)

    def leave(self, visit: "TrackedRequest") -> None:
        """It has been answered."""
        self._inside.discard(visit)
        if self.refusal is not None and not self._inside:
            self.on_empty()


class AdmissionMiddleware:
    """The middleware: ``app.add_middleware(AdmissionMiddleware, gate=gate)``."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in, or refuse."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] not in ("http", "websocket") or path in OPEN_ROUTES:
            await self._app(scope, receive, send)
            return
        visit = TrackedRequest(scope, receive, send)
        why = self._admission.why_shut()
        if why is not None:
            await visit.refuse(why)
            return
        self._admission.enter(visit)
        try:
            await visit.run(self._app, scope)
        finally:
            self._admission.leave(visit)


class TrackedRequest:
    """One request inside. Once cut, the app sees a client that has hung up, and the client an error."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._kind: str = scope["type"]
        self._may_answer_handshake = "websocket.http.response" in scope.get("extensions", {})
        self._from_client, self._to_client = receive, send
        self._reading: asyncio.Future[Message] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._cut = asyncio.get_running_loop().create_future()
        self._begun = self._done = self._is_stream = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Have the app answer it."""
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            if self._telling is None:
                raise
        finally:
            if self._reading is not None:
                self._reading.cancel()
            if self._telling is not None:
                await self._telling

    def cut(self, why: str) -> None:
        """End it now."""
        if not self._cut.done():
            self._cut.set_result(None)
            self._telling = asyncio.ensure_future(self._tell(why))

    async def refuse(self, why: str) -> None:
        """Answer it with an error of ours; nothing has been answered yet (a WebSocket may be open)."""
        kind = self._kind
        if kind == "websocket":
            if self._begun or not self._may_answer_handshake:
                await self._to_client({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": why})
                return
            kind = "websocket.http"
        body = error_body(why)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(RETRY_AFTER_S).encode()),
            (b"connection", b"close"),
        ]
        status = HTTPStatus.SERVICE_UNAVAILABLE
        await self._to_client({"type": f"{kind}.response.start", "status": status, "headers": headers})
        await self._to_client({"type": f"{kind}.response.body", "body": body})

    async def _tell(self, why: str) -> None:
        if not self._begun or self._kind == "websocket":
            await self.refuse(why)
        elif self._is_stream and not self._done:
            last = b"data: " + error_body(why) + b"\n\ndata: [DONE]\n\n"
            await self._to_client({"type": "http.response.body", "body": last})
        # Half of any other body can't be mended: the server closes the connection.

    async def _receive(self) -> Message:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._from_client())
        await asyncio.wait((self._reading, self._cut), return_when=asyncio.FIRST_COMPLETED)
        if self._cut.done():
            return {"type": f"{self._kind}.disconnect", "code": _TRY_AGAIN_LATER}
        reading, self._reading = self._reading, None
        return reading.result()

    async def _send(self, message: Message) -> None:
        if self._cut.done():
            return
        if message["type"] == "websocket.accept":
            self._begun = True
        elif message["type"] == "http.response.start":
            self._begun = True
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = content_type.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self._done = not message.get("more_body", False)
        await self._to_client(message)


def error_body(why: str) -> bytes:
    """An error as OpenAI's API and vLLM word it."""
    code = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": why, "type": "ServiceUnavailableError", "param": None, "code": code.value}
    return json.dumps({"error": error}).encode()
