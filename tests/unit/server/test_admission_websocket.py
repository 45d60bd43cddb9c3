"""Responses to a WebSocket client while a server fails or ends: a real server and a real client."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
import websockets
from starlette.types import Receive, Scope, Send

from spmd_serve.server.admission import AdmissionControl, AdmissionMiddleware

TIMEOUT_S = 20.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "websocket.disconnect":
        if message["type"] == "websocket.connect":
            await send({"type": "websocket.accept"})
        else:
            await send({"type": "websocket.send", "text": message["text"]})


@asynccontextmanager
async def served(admission: AdmissionControl) -> AsyncIterator[str]:
    """Run a server and yield its URL."""
    middleware = AdmissionMiddleware(echo, admission)
    server = uvicorn.Server(
        uvicorn.Config(middleware, lifespan="off", log_level="warning", ws="websockets-sansio")
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.ensure_future(server.serve([listener]))
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/realtime"
        finally:
            server.should_exit = True
            await task


def test_one_in_flight_is_closed_with_1013_and_a_new_one_refused_with_503() -> None:
    async def body() -> None:
        admission = AdmissionControl()
        async with served(admission) as url:
            async with websockets.connect(url) as running:
                await running.send("hello")
                assert await running.recv() == "hello"
                admission.abort("rank 1 is gone")
                await running.wait_closed()
                assert (running.close_code, running.close_reason) == (1013, "rank 1 is gone")
            try:
                async with websockets.connect(url):
                    raise AssertionError("it was admitted")
            except websockets.InvalidStatus as refused:
                response = refused.response
            assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
            assert b"rank 1 is gone" in response.body

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))
