"""Our HTTP routes: /health (of all ranks), /ready, /topology and /metrics, in an endpoint plugin of vLLM."""

import os
import socket
from argparse import Namespace
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.responses import Response

from spmd_serve.config.job_spec import ADDITIONAL_CONFIG_KEY, JobSpec
from spmd_serve.liveness.metrics import render
from spmd_serve.server.admission import RETRY_AFTER_S, AdmissionControl, AdmissionMiddleware
from spmd_serve.server.events import JobEvents
from spmd_serve.server.listener import about_to_listen

LISTENING: socket.socket | None = None
"""The HTTP socket of a single API server, which starts to listen directly after `Plugin.init_state`."""

ROOT_CAUSE_S = 1.0
"""Seconds to wait for the root cause of an engine's death; the watcher takes 0.3 s to settle on one."""


class Plugin:
    """Implements vLLM's EndpointPlugin protocol."""

    name = "spmd_serve"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes. Our /health replaces vLLM's, which asks only whether the engine has failed."""
        self._admission = AdmissionControl()
        app.add_middleware(AdmissionMiddleware, admission=self._admission)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ready", self.ready, methods=["GET"])
        app.add_api_route("/topology", self.topology, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Subscribe to the job's events. The server accepts connections after this call."""
        self._engine = engine_client
        self._admission.engine_is_dead = lambda: engine_client is not None and bool(engine_client.errored)
        self._spec = JobSpec.from_json(args.additional_config[ADDITIONAL_CONFIG_KEY])
        self._events = JobEvents(self._admission, self._spec.drain_s)
        await self._events.follow(self._spec.watcher)
        if LISTENING is not None:
            about_to_listen(LISTENING)

    async def health(self) -> JSONResponse:
        """Answer 200 if the engine and all ranks live, else 503 with the failed rank and the cause."""
        return await self._failure() or JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """Answer 200 while new requests are admitted."""
        if self._events.draining is not None and self._events.root_cause is None:
            return unavailable({"status": "draining", "cause": self._events.draining})
        return await self._failure() or JSONResponse({"status": "ready"})

    async def topology(self) -> JSONResponse:
        """Answer with the watcher's view of the job's processes, and each rank's place in the layout."""
        try:
            return JSONResponse(placed(await self._events.view(), self._spec))
        except OSError as gone:
            return unavailable({"error": f"the watcher of this node does not answer: {gone}"})

    async def metrics(self) -> Response:
        """Answer with vLLM's metrics, then ours, which the watcher has and each API server can show."""
        text = await run_in_threadpool(own_metrics)
        with suppress(OSError):  # without the watcher, vLLM's metrics only
            text += render(await self._events.view()).encode()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _failure(self) -> JSONResponse | None:
        if (
            self._events.root_cause is None
            and self._admission.engine_is_dead()
            and self._events.draining is None
        ):
            await self._events.wait_for_root_cause(ROOT_CAUSE_S)
        if self._events.root_cause is not None:
            return unavailable({"status": "failed", **self._events.root_cause.to_json()})
        if self._admission.engine_is_dead() and self._events.draining is None:
            cause = {"rank": None, "hostname": None, "cause": "the engine core has failed"}
            return unavailable({"status": "failed", **cause})
        return None


def own_metrics() -> bytes:
    """Return the metrics of vLLM, of all API servers of this endpoint."""
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # vLLM sets it for several API servers
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def placed(view: dict[str, Any], spec: JobSpec) -> dict[str, Any]:
    """Add each rank's device, address and coordinates, and the layout, to the watcher's view."""
    for row in view["members"]:
        if row["kind"] == "rank" and row["rank"] is not None:
            info = spec.cluster.ranks[row["rank"]]
            coords = spec.layout.coords(row["rank"])
            row |= {"device": info.device, "address": info.address, **coords._asdict()}
    return view | {"layout": {"tp": spec.layout.tp, "pp": spec.layout.pp, "dp": spec.layout.dp}}


def unavailable(body: dict[str, Any]) -> JSONResponse:
    """Return a response with status 503."""
    return JSONResponse(body, status_code=503, headers={"Retry-After": str(RETRY_AFTER_S)})


def plugin() -> Plugin:
    """Return the plugin; the package's entry point names this function."""
    return Plugin()
