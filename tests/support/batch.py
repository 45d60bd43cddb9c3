"""Batches with a fake engine, in a folder."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from spmd_serve.batch import Answer, BatchLine, BatchOptions, Launch, prepare, run_batch
from spmd_serve.errors import ExitCode

DEADLINE_S = 30


def request(number: int, **more: Any) -> dict[str, Any]:
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/x", "body": {"value": number}, **more}


def good_output(line: BatchLine) -> dict[str, Any]:
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    body = {"echo": dict(line.body), "usage": usage, "choices": [{"index": 0, "text": "yes"}]}
    response = {"status_code": 200, "request_id": f"r-{line.custom_id}", "body": body}
    return {"id": f"v-{line.custom_id}", "custom_id": line.custom_id, "response": response, "error": None}


async def backwards(line: BatchLine) -> dict[str, Any]:
    """An answer that is finished before those of the lines before."""
    for _ in range(10 - line.number % 10):
        await asyncio.sleep(0.001)
    return good_output(line)


class Engine:
    """Counts who was asked, and how many at a time."""

    def __init__(self, reply: Callable[[BatchLine], Awaitable[dict[str, Any]]] | None = None) -> None:
        self.asked: list[int] = []
        self.now = self.most = 0
        self._reply = reply

    async def __call__(self, line: BatchLine) -> dict[str, Any]:
        self.asked.append(line.number)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            return good_output(line) if self._reply is None else await self._reply(line)
        finally:
            self.now -= 1


class Written:
    """The answers of a batch, at `output`."""

    output: Path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def by_id(self) -> dict[str, dict[str, Any]]:
        lines = self.lines()
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found


class Place(Written):
    """An input and an output in a folder."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.said: list[str] = []

    def put(self, *lines: bytes | Mapping[str, Any]) -> None:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"\n".join(raw) + b"\n")

    def put_many(self, count: int) -> None:
        self.put(*(request(number) for number in range(1, count + 1)))

    def options(self, **more: Any) -> BatchOptions:
        return BatchOptions(**{"input_file": str(self.input), "output_file": str(self.output), **more})

    def run(
        self,
        answer: Answer,
        *,
        flags: Mapping[str, str] | None = None,
        launch: Launch | None = None,
        **more: Any,
    ) -> ExitCode:
        prepared = prepare(self.options(**more), flags, launch or Launch(), self.said.append)
        running = run_batch(answer, prepared.options, prepared=prepared, say=self.said.append)
        return asyncio.run(asyncio.wait_for(running, DEADLINE_S))
