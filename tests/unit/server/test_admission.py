"""Responses while a server fails or ends: the ASGI middleware with an app of a few lines."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from spmd_serve.server.admission import AdmissionControl, AdmissionMiddleware

TIMEOUT_S = 10.0


class Client:
    """One request: its response, and whether the app has seen the client disconnect."""

    def __init__(
        self, admission: AdmissionControl, path: str = "/v1/completions", *, stream: bool = True
    ) -> None:
        self.response: list[Message] = []
        self.app_saw_disconnect = False
        self.stream = stream
        self.begun = asyncio.Event()
        self.finish = asyncio.Event()
        middleware = AdmissionMiddleware(self._app, admission)
        scope: Scope = {"type": "http", "path": path, "root_path": ""}
        self.task = asyncio.ensure_future(middleware(scope, self._receive, self._send))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = b"text/event-stream" if self.stream else b"application/json"
        if self.stream:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
            await send({"type": "http.response.body", "body": b"data: token\n\n", "more_body": True})
        self.begun.set()
        disconnect = asyncio.ensure_future(receive())
        finish = asyncio.ensure_future(self.finish.wait())
        await asyncio.wait((disconnect, finish), return_when=asyncio.FIRST_COMPLETED)
        self.app_saw_disconnect = disconnect.done() and disconnect.result()["type"] == "http.disconnect"
        disconnect.cancel()
        finish.cancel()
        if not self.stream:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _receive(self) -> Message:
        await asyncio.Event().wait()  # a client that waits
        raise AssertionError

    async def _send(self, message: Message) -> None:
        self.response.append(message)

    @property
    def status(self) -> int:
        return int(self.response[0]["status"])

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.response).decode()

    @property
    def is_complete(self) -> bool:
        return not self.response[-1].get("more_body", False)


def run(what: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(what, TIMEOUT_S))


def test_admitted_requests_are_unchanged() -> None:
    async def body() -> None:
        for stream in (True, False):
            client = Client(AdmissionControl(), stream=stream)
            client.finish.set()
            await client.task
            assert client.status == 200 and client.is_complete and client.body.endswith("data: [DONE]\n\n")
            assert not client.app_saw_disconnect

    run(body())


def test_new_requests_are_refused_and_those_in_flight_finish() -> None:
    async def body() -> None:
        empty: list[bool] = []
        admission = AdmissionControl(on_empty=lambda: empty.append(True))
        running = Client(admission)
        await running.begun.wait()
        admission.stop_admitting("going")
        late = Client(admission)
        await late.task
        assert late.status == 503 and not late.begun.is_set()
        headers = dict(late.response[0]["headers"])
        assert int(headers[b"retry-after"]) > 0
        error = json.loads(late.body)["error"]
        assert (error["message"], error["code"]) == ("going", 503)
        assert not empty
        running.finish.set()
        await running.task
        assert running.body == "data: token\n\ndata: [DONE]\n\n" and empty == [True]

    run(body())


def test_on_empty_is_called_at_once_without_requests() -> None:
    empty: list[bool] = []
    AdmissionControl(on_empty=lambda: empty.append(True)).stop_admitting("going")
    assert empty == [True]


def test_probes_are_answered_in_any_state() -> None:
    async def body() -> None:
        admission = AdmissionControl(refusal="going")
        for path in ("/health", "/ready", "/topology", "/metrics"):
            client = Client(admission, path)
            client.finish.set()
            await client.task
            assert client.status == 200

    run(body())


def test_an_aborted_stream_gets_an_error_event_and_its_end() -> None:
    async def body() -> None:
        admission = AdmissionControl()
        client = Client(admission)
        await client.begun.wait()
        admission.abort("rank 1 is gone")
        await client.task
        assert client.app_saw_disconnect and client.is_complete
        first, error, done, rest = client.body.split("\n\n")
        assert (first, done, rest) == ("data: token", "data: [DONE]", "")
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "rank 1 is gone"

    run(body())


def test_an_aborted_request_without_stream_gets_503() -> None:
    async def body() -> None:
        admission = AdmissionControl()
        client = Client(admission, stream=False)
        await client.begun.wait()
        admission.abort("rank 1 is gone")
        await client.task
        assert client.app_saw_disconnect and client.status == 503 and client.is_complete
        assert json.loads(client.body)["error"]["message"] == "rank 1 is gone"
        assert len(client.response) == 2  # nothing of the app's own response follows

    run(body())


def test_a_dead_engine_refuses_requests() -> None:
    async def body() -> None:
        client = Client(AdmissionControl(engine_is_dead=lambda: True))
        await client.task
        assert client.status == 503

    run(body())
