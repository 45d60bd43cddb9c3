"""Answers from vLLM's own endpoints. The only file of the package that imports vLLM, and only when called.

Written against vLLM 0.32: `vllm.entrypoints.launchers.run_batch` (its request and response models, the
registry of endpoints, `handle_endpoint_request`), one request at a time. Its ``/v1/completions``, which
vLLM's own run-batch lacks, is taken from the same state that the registry is built from.
"""

import argparse
import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from uuid import uuid4

from spmd_serve.batch import prepare as preparation
from spmd_serve.batch.loop import DRAIN_S, WINDOW, run_batch
from spmd_serve.batch.options import BatchOptions
from spmd_serve.batch.prepare import Prepared
from spmd_serve.batch.request_lines import BatchLine, error_output
from spmd_serve.errors import ExitCode, PeerLost, UsageError

COMPLETIONS = "/v1/completions"

_DEAD = "EngineCore encountered an issue"
_GO_ON = "what was finished is kept, run the same command again to go on"


class EngineClient(Protocol):
    """What this file needs of vLLM's EngineClient itself."""

    vllm_config: Any

    @property
    def errored(self) -> bool: ...


async def run_batch_with_engine(
    engine_client: EngineClient,
    args: argparse.Namespace,
    options: BatchOptions,
    *,
    prepared: Prepared | None = None,
    say: Callable[[str], None] = preparation.say,
) -> ExitCode:
    """`run_batch` with the answers of a running vLLM engine.

    `args` is a namespace of ``vllm serve``'s parser. Raises PeerLost when the engine dies; lines in flight
    then have no answer, and a rerun asks them again.
    """
    endpoints = await Endpoints.create(engine_client, args)
    drain_s = float(getattr(args, "shutdown_timeout", 0) or DRAIN_S)
    window = window_for(engine_client.vllm_config)
    return await run_batch(
        endpoints.answer, options, prepared=prepared, window=window, drain_s=drain_s, say=say
    )


def open_engine(args: argparse.Namespace) -> AbstractAsyncContextManager[Any]:
    """vLLM's engine client for the command line, as an async context manager."""
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    from spmd_serve.engine.vllm_compat import check_batch

    check_batch()  # imports what answers too: now, not when all ranks are ready
    client: AbstractAsyncContextManager[Any] = build_async_engine_client(args)
    return client


def window_for(vllm_config: Any) -> int:
    """Lines in flight that keep all replicas busy: twice what their schedulers run at a time."""
    at_a_time: int = (
        vllm_config.scheduler_config.max_num_seqs * vllm_config.parallel_config.data_parallel_size
    )
    return max(2 * at_a_time, WINDOW)


def start_metrics(options: BatchOptions, args: argparse.Namespace) -> None:
    """Serve Prometheus metrics, where asked for. Call before loading. UsageError: the port is taken."""
    if not options.enable_metrics:
        return
    from prometheus_client import start_http_server

    try:
        start_http_server(port=args.port, addr=args.host or "0.0.0.0")
    except OSError as problem:
        raise UsageError(
            f"--port {args.port} cannot be bound for --enable-metrics: {problem.strerror}"
        ) from problem


class Endpoints:
    """vLLM's handlers by URL."""

    def __init__(
        self, engine_client: EngineClient, registry: dict[str, dict[str, Any]], completions: Any
    ) -> None:
        self._engine_client = engine_client
        self._registry = registry
        self._completions = completions

    @classmethod
    async def create(cls, engine_client: EngineClient, args: argparse.Namespace) -> "Endpoints":
        """Build vLLM's serving objects around an engine."""
        from vllm.entrypoints.launchers import run_batch as stock

        kept = []

        class KeptState(stock.State):
            """The registry's builder keeps its state to itself; completions are in there."""

            def __init__(self) -> None:
                super().__init__()
                kept.append(self)

        original, stock.State = stock.State, KeptState
        try:
            registry = await stock.build_endpoint_registry(engine_client, args)
        finally:
            stock.State = original
        return cls(engine_client, registry, getattr(kept[0], "openai_serving_completion", None))

    async def answer(self, line: BatchLine) -> dict[str, Any]:
        """The output object of one line. Raises PeerLost when the engine is dead, or about to end."""
        output = await (self._complete(line) if line.url == COMPLETIONS else self._handle(line))
        response = output["response"] or {}
        if response.get("status_code", 200) >= 500:
            await asyncio.sleep(0)
            if self._engine_client.errored or _DEAD in str(output["error"]):
                raise PeerLost(f"the engine is gone: {_GO_ON}")
        if _is_aborted(response.get("body")):
            raise PeerLost(f"the engine was told to end: {_GO_ON}")
        return output

    async def _handle(self, line: BatchLine) -> dict[str, Any]:
        from vllm.entrypoints.launchers import run_batch as stock

        entry = self._registry.get(line.url.rsplit("/", 1)[-1])
        if entry is None or not entry["url_matcher"](line.url):
            return error_output(
                line.custom_id, f"URL {line.url} was used. Supported endpoints: {', '.join(_URLS)}."
            )
        try:
            request = stock.BatchRequestInput.model_validate(
                {"custom_id": line.custom_id, "method": line.method, "url": line.url, "body": line.body}
            )
        except Exception as problem:
            return _refused(line, problem)
        answering = stock.handle_endpoint_request(request, stock.BatchProgressTracker(), **entry)
        assert answering is not None
        output: dict[str, Any] = (await answering).model_dump(mode="json")
        return output

    async def _complete(self, line: BatchLine) -> dict[str, Any]:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
        from vllm.entrypoints.serve import create_error_response
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        if self._completions is None:
            return error_output(line.custom_id, f"Model does not support endpoint: {line.url}")
        try:
            request = CompletionRequest.model_validate(line.body)
        except Exception as problem:
            return _refused(line, problem)
        try:
            answer = await self._completions.create_completion(request)
        except Exception as problem:
            answer = create_error_response(problem)
        if isinstance(answer, ErrorResponse):
            return error_output(line.custom_id, answer.model_dump(mode="json"), answer.error.code)
        if not isinstance(answer, CompletionResponse):
            return error_output(line.custom_id, "Request must not be sent in stream mode")
        return {
            "id": f"vllm-{uuid4().hex}",
            "custom_id": line.custom_id,
            "response": {
                "status_code": 200,
                "request_id": f"vllm-batch-{uuid4().hex}",
                "body": answer.model_dump(mode="json"),
            },
            "error": None,
        }


_URLS = (
    "/v1/chat/completions",
    COMPLETIONS,
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/score",
    "/rerank",
)


def _is_aborted(body: Any) -> bool:
    """Whether an answer was cut: an engine core that got SIGTERM says "abort", with status 200."""
    choices = (body.get("choices") if isinstance(body, dict) else None) or ()
    return any(choice.get("finish_reason") == "abort" for choice in choices)


def _refused(line: BatchLine, problem: Exception) -> dict[str, Any]:
    """A body that is none of the endpoint's requests (there vLLM's run-batch stops altogether)."""
    from pydantic import ValidationError

    if not isinstance(problem, ValidationError):
        return error_output(line.custom_id, f"body: {problem}")
    first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {problem.error_count() - 1} more)" if problem.error_count() > 1 else ""
    return error_output(line.custom_id, f"body: {where + ': ' if where else ''}{first['msg']}{more}")
