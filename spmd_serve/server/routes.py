"""Our HTTP routes beside vLLM's: /health that means all ranks, /ready, /topology (an endpoint plugin)."""

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
"""The door's socket in a single API server, which starts to listen right after our state is made."""

VERDICT_S = 1.0
"""How long to wait for the cause of an engine's death: the watcher looks 0.3 s for the first one."""


class Plugin:
    """vLLM's EndpointPlugin protocol."""

    name = "spmd_serve"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; /health replaces vLLM's, which asks only whether the engine has failed already."""
        self._admission = AdmissionControl()
        app.add_middleware(AdmissionMiddleware, admission=self._admission)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ready", self.ready, methods=["GET"])
        app.add_api_route("/topology", self.topology, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Follow the job's news; from here on connections are accepted."""
        self._engine = engine_client
        self._admission.engine_is_dead = lambda: engine_client is not None and bool(engine_client.errored)
        self._spec = JobSpec.from_json(args.additional_config[ADDITIONAL_CONFIG_KEY])
        self._events = JobEvents(self._admission, self._spec.drain_s)
        await self._events.follow(self._spec.watcher)
        if LISTENING is not None:
            about_to_listen(LISTENING)

    async def health(self) -> JSONResponse:
        """200 when the engine and every rank live; 503 with the lost rank, its host and the cause."""
        return await self._failure() or JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """200 while new requests are taken."""
        if self._events.draining is not None and self._events.root_cause is None:
            return unavailable({"status": "draining", "cause": self._events.draining})
        return await self._failure() or JSONResponse({"status": "ready"})

    async def topology(self) -> JSONResponse:
        """Every process of the job as its watcher sees it, and for ranks where they are in the layout."""
        try:
            return JSONResponse(placed(await self._events.view(), self._spec))
        except OSError as gone:
            return unavailable({"error": f"the watcher of this host does not answer: {gone}"})

    async def metrics(self) -> Response:
        """vLLM's metrics, then ours, which come from the watcher, whichever API server is asked."""
        text = await run_in_threadpool(own_metrics)
        with suppress(OSError):  # then only vLLM's
            text += render(await self._events.view()).encode()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _failure(self) -> JSONResponse | None:
        if (
            self._events.root_cause is None
            and self._admission.engine_is_dead()
            and self._events.draining is None
        ):
            await self._events.judged(VERDICT_S)
        if self._events.root_cause is not None:
            return unavailable({"status": "failed", **self._events.root_cause.to_json()})
        if self._admission.engine_is_dead() and self._events.draining is None:
            cause = {"rank": None, "hostname": None, "cause": "the engine core has failed"}
            return unavailable({"status": "failed", **cause})
        return None


def own_metrics() -> bytes:
    """vLLM's, of all API servers."""
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # there are several
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def placed(view: dict[str, Any], spec: JobSpec) -> dict[str, Any]:
    """The view, with each rank's device, address and coordinates."""
    for row in view["members"]:
        if row["kind"] == "rank" and row["rank"] is not None:
            info = spec.cluster.ranks[row["rank"]]
            coords = spec.layout.coords(row["rank"])
            row |= {"device": info.device, "address": info.address, **coords._asdict()}
    return view | {"layout": {"tp": spec.layout.tp, "pp": spec.layout.pp, "dp": spec.layout.dp}}


def unavailable(body: dict[str, Any]) -> JSONResponse:
    """A 503."""
    return JSONResponse(body, status_code=503, headers={"Retry-After": str(RETRY_AFTER_S)})


def plugin() -> Plugin:
    """Factory named by the entry point."""
    return Plugin()
