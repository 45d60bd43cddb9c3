"""`spmd_serve batch` under torchrun: an input, an output, and runs from the one to the other."""

import base64
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.processes import descendants
from harness.server import Server
from harness.torchrun import torchrun_command
from tests.support.batch import Written
from tests.support.job import job_environ
from tests.support.stock import SMALL_FLAGS, SMALL_FLAGS_PP

DEADLINE_S = 240.0
UNLIKE = frozenset({"id", "created", "request_id", "system_fingerprint"})
"""Fields that are new in every run, or name the layout."""


def row(number: int, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}


def chat(number: int, content: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 0, **more}
    return row(number, "/v1/chat/completions", body)


def _numbers(name: str, value: Any) -> Any:
    """The float32 numbers of an embedding in base64: several ranks may round their last bits otherwise."""
    if name == "embedding" and isinstance(value, str):
        return [number for (number,) in struct.iter_unpack("<f", base64.b64decode(value))]
    return value


def comparable(value: Any) -> Any:
    """Without what is new in every run, our ``line N:``, and the list of endpoints (ours has more)."""
    if isinstance(value, dict):
        return {name: comparable(_numbers(name, part)) for name, part in value.items() if name not in UNLIKE}
    if isinstance(value, list):
        return [comparable(part) for part in value]
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-3, abs=1e-4)
    if isinstance(value, str):
        return re.sub(r"^line \d+: ", "", value).partition(" Supported endpoints:")[0]
    return value


@dataclass(frozen=True)
class Ended:
    """How a run ended: torchrun's exit code, and all that was printed."""

    code: int
    text: str


class Bench(Written):
    """An input, an output, and runs from the one to the other."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.input, self.output, self.log = folder / "in.jsonl", folder / "out.jsonl", folder / "log"
        self._model, self._flags = model, flags

    def put(self, lines: Sequence[Mapping[str, Any] | bytes]) -> None:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"\n".join(raw) + b"\n")

    def server(self, *more: str, ranks: int = 2, max_restarts: int = 0) -> Server:
        """A run that is started and ended by `with`; one log for all of them."""
        small = SMALL_FLAGS_PP if "-pp=2" in more else SMALL_FLAGS
        arguments = ["batch", str(self._model), *small, *self._flags, *more]
        if not any(word.startswith("--prompts") for word in more):
            arguments += [f"-i={self.input}"]
        if "-o" not in more:
            arguments += [f"-o={self.output}"]
        command = torchrun_command(ranks, arguments, max_restarts=max_restarts)
        return Server(command, self.log, environ=job_environ())

    def run(self, *more: str, ranks: int = 2, max_restarts: int = 0) -> Ended:
        """A run to its own end; nothing of it may be left then."""
        start = len(self.log.read_text(errors="replace")) if self.log.exists() else 0
        with self.server(*more, ranks=ranks, max_restarts=max_restarts) as server:
            code = server.wait_exit(DEADLINE_S)
            assert not descendants(server.pid)
            return Ended(code, server.text()[start:])

    def has(self, count: int) -> bool:
        """Whether so many answers are written."""
        return self.output.exists() and self.output.read_bytes().count(b"\n") >= count
