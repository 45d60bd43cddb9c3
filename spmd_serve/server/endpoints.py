"""Our HTTP routes beside vLLM's: /health that means all ranks, /ready, /topology (an endpoint plugin)."""

import socket
from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from spmd_serve.control import ADDITIONAL_CONFIG_KEY, ControlSpec
from spmd_serve.liveness import fetch_view
from spmd_serve.server.door import about_to_listen

LISTENING: socket.socket | None = None
"""The door's socket in a single API server, which starts to listen right after our state is made."""

VIEW_TIMEOUT_S = 2.0


class Plugin:
    """vLLM's EndpointPlugin protocol."""

    name = "spmd_serve"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; /health replaces vLLM's, which asks only whether the engine has failed already."""
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ready", self.ready, methods=["GET"])
        app.add_api_route("/topology", self.topology, methods=["GET"])
        self._app = app

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Remember the engine client; from here on connections are accepted."""
        self._engine = engine_client
        plain = (args.additional_config or {}).get(ADDITIONAL_CONFIG_KEY)
        self._watcher = ControlSpec.from_json(plain).watcher if plain is not None else None
        if LISTENING is not None:
            about_to_listen(LISTENING)

    async def health(self) -> JSONResponse:
        """200 when the engine and every rank live; 503 with the lost rank, its host and the cause."""
        problem = await self._problem()
        if problem is not None:
            return JSONResponse({"status": "failed", **problem}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """200 while new requests are taken."""
        problem = await self._problem()
        if problem is not None:
            return JSONResponse({"status": "failed", **problem}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def topology(self) -> JSONResponse:
        """Every process of the job as its watcher sees it."""
        if self._watcher is None:
            return JSONResponse({"error": "no watcher runs"}, status_code=503)
        return JSONResponse(await run_in_threadpool(fetch_view, self._watcher, VIEW_TIMEOUT_S))

    async def _problem(self) -> dict[str, Any] | None:
        if self._watcher is not None:
            try:
                view = await run_in_threadpool(fetch_view, self._watcher, VIEW_TIMEOUT_S)
            except OSError as gone:
                return {"cause": f"the watcher of this host does not answer: {gone}"}
            if view.get("verdict"):
                return dict(view["verdict"])
        if self._engine is not None and self._engine.errored:
            return {"cause": "the engine core has failed"}
        return None


def plugin() -> Plugin:
    """Factory named by the entry point."""
    return Plugin()
