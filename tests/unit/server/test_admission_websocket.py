"""What a WebSocket's client is told while a server fails or ends: a real server, a real client."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
import websockets
from starlette.types import Receive, Scope, Send

from spmd_serve.server.admission import AdmissionControl, AdmissionMiddleware

LIMIT_S = 20.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "websocket.disconnect":
        if message["type"] == "websocket.connect":
            await send({"type": "websocket.accept"})
        else:
            await send({"type": "websocket.send", "text": message["text"]})


@asynccontextmanager
async def served(admission: AdmissionControl) -> AsyncIterator[str]:
    """Its URL."""
    keeper = AdmissionMiddleware(echo, admission)
    server = uvicorn.Server(
        uvicorn.Config(keeper, lifespan="off", log_level="warning", ws="websockets-sansio")
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.ensure_future(server.serve([listener]))
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/realtime"
        finally:
            server.should_exit = True
            await task


def test_one_inside_is_closed_with_try_again_later_and_a_new_one_refused_with_503() -> None:
    async def body() -> None:
        admission = AdmissionControl()
        async with served(admission) as url:
            async with websockets.connect(url) as inside:
                await inside.send("hello")
                assert await inside.recv() == "hello"
                admission.cut("rank 1 is gone")
                await inside.wait_closed()
                assert (inside.close_code, inside.close_reason) == (1013, "rank 1 is gone")
            try:
                async with websockets.connect(url):
                    raise AssertionError("it was let in")
            except websockets.InvalidStatus as refused:
                answer = refused.response
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert b"rank 1 is gone" in answer.body

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
