"""Admission control (ASGI middleware): refuses requests, and aborts those in flight, when the job ends."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_ROUTES = frozenset({"/health", "/ready", "/topology", "/metrics", "/metrics/"})
"""Routes that are answered in any state."""
RETRY_AFTER_S = 10
"""Value of the Retry-After header: about the seconds in which a restarted job loads a small model."""
_WEBSOCKET_TRY_LATER = 1013
"""WebSocket close code "Try Again Later" (registry of RFC 6455)."""


@dataclass(eq=False)
class AdmissionControl:
    """The state that all requests share. Used in the event loop's thread only."""

    refusal: str | None = None
    """Why new requests are refused; None: they are admitted."""
    engine_is_dead: Callable[[], bool] = lambda: False
    on_empty: Callable[[], None] = lambda: None
    """Called when no tracked request is left and new ones are refused."""
    _tracked: "set[TrackedRequest]" = field(default_factory=set)

    def refusal_reason(self) -> str | None:
        """Return the error message for a new request, or None if it is admitted."""
        if self.refusal is None and self.engine_is_dead():
            return "The engine of this server has failed (see /health); try again later."
        return self.refusal

    def stop_admitting(self, reason: str) -> None:
        """Refuse new requests; those in flight continue."""
        self.refusal = reason
        if not self._tracked:
            self.on_empty()

    def abort(self, reason: str) -> None:
        """Refuse new requests, and end those in flight with an error."""
        self.refusal = reason
        for request in self._tracked:
            request.abort(reason)

    def track(self, request: "TrackedRequest") -> None:
        """Record an admitted request."""
        self._tracked.add(request)

    def untrack(self, request: "TrackedRequest") -> None:
        """Remove a request that is finished."""
        self._tracked.discard(request)
        if self.refusal is not None and not self._tracked:
            self.on_empty()


class AdmissionMiddleware:
    """The middleware: ``app.add_middleware(AdmissionMiddleware, admission=admission)``."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, or refuse it."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] not in ("http", "websocket") or path in OPEN_ROUTES:
            await self._app(scope, receive, send)
            return
        request = TrackedRequest(scope, receive, send)
        reason = self._admission.refusal_reason()
        if reason is not None:
            await request.refuse(reason)
            return
        self._admission.track(request)
        try:
            await request.run(self._app, scope)
        finally:
            self._admission.untrack(request)


class TrackedRequest:
    """One request. After `abort` the app sees a disconnected client, and the client sees an error."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._kind: str = scope["type"]
        self._may_answer_handshake = "websocket.http.response" in scope.get("extensions", {})
        self._from_client, self._to_client = receive, send
        self._reading: asyncio.Future[Message] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._aborted = asyncio.get_running_loop().create_future()
        self._begun = self._done = self._is_stream = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the app for this request."""
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            if self._aborting is None:
                raise
        finally:
            if self._reading is not None:
                self._reading.cancel()
            if self._aborting is not None:
                await self._aborting

    def abort(self, reason: str) -> None:
        """End the request with an error. A second call does nothing."""
        if not self._aborted.done():
            self._aborted.set_result(None)
            self._aborting = asyncio.ensure_future(self._send_abort(reason))

    async def refuse(self, reason: str) -> None:
        """Send a 503. Only before the response has begun; an accepted WebSocket is closed instead."""
        kind = self._kind
        if kind == "websocket":
            if self._begun or not self._may_answer_handshake:
                close: Message = {"type": "websocket.close", "code": _WEBSOCKET_TRY_LATER, "reason": reason}
                await self._to_client(close)
                return
            kind = "websocket.http"
        body = error_body(reason)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(RETRY_AFTER_S).encode()),
            (b"connection", b"close"),
        ]
        status = HTTPStatus.SERVICE_UNAVAILABLE
        await self._to_client({"type": f"{kind}.response.start", "status": status, "headers": headers})
        await self._to_client({"type": f"{kind}.response.body", "body": body})

    async def _send_abort(self, reason: str) -> None:
        if not self._begun or self._kind == "websocket":
            await self.refuse(reason)
        elif self._is_stream and not self._done:
            last = b"data: " + error_body(reason) + b"\n\ndata: [DONE]\n\n"
            await self._to_client({"type": "http.response.body", "body": last})
        # Any other response that has begun cannot carry an error: the server closes the connection.

    async def _receive(self) -> Message:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._from_client())
        await asyncio.wait((self._reading, self._aborted), return_when=asyncio.FIRST_COMPLETED)
        if self._aborted.done():
            return {"type": f"{self._kind}.disconnect", "code": _WEBSOCKET_TRY_LATER}
        reading, self._reading = self._reading, None
        return reading.result()

    async def _send(self, message: Message) -> None:
        if self._aborted.done():
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


def error_body(reason: str) -> bytes:
    """Return the JSON of an error in the format of OpenAI's API and vLLM."""
    code = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": reason, "type": "ServiceUnavailableError", "param": None, "code": code.value}
    return json.dumps({"error": error}).encode()
