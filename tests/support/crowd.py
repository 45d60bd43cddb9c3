"""Many clients at once, each in a thread of its own, that note how their request ended, and when."""

import http.client
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from harness.waiting import wait_until
from tests.support.endpoint import NAME

REQUEST_LIMIT_S = 60.0
ENDLESS = 30_000
"""Tokens that take far longer than any test waits with its fault: no answer is complete when it comes."""
ROOM = "--max-model-len=32768"
"""The flag of a server that is asked for `ENDLESS` tokens."""


@dataclass
class Request:
    """One client's request and what became of it. Times are time.monotonic()."""

    stream: bool
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    broken: str | None = None
    """How the connection ended, where it did not end as HTTP says (reset, cut, silent for too long)."""
    began: bool = False
    ended_at: float | None = None

    @property
    def events(self) -> list[str]:
        """What the `data:` lines of a stream hold."""
        return [line[6:] for line in self.body.splitlines() if line.startswith("data: ")]

    @property
    def error(self) -> dict[str, Any] | None:
        """The OpenAI error that the client was told, in the body or in the stream's last event but [DONE]."""
        texts = [text for text in self.events if text != "[DONE]"][-1:] if self.stream else [self.body]
        if self.stream and self.status != 200:
            texts = [self.body]
        for text in texts:
            error = json.loads(text).get("error")
            if isinstance(error, dict):
                return error
        return None

    @property
    def is_complete(self) -> bool:
        """Whether the client got a whole answer."""
        if self.status != 200 or self.broken is not None or self.error is not None:
            return False
        return self.events[-1:] == ["[DONE]"] if self.stream else '"finish_reason"' in self.body


class Crowd:
    """`with Crowd(url, streams=20, plain=5, tokens=400):` asks inside the block and waits at its end."""

    def __init__(self, url: str, *, streams: int, plain: int, tokens: int) -> None:
        self.requests = [Request(stream=number < streams) for number in range(streams + plain)]
        self._address = urlsplit(url)
        self._tokens = tokens
        self._threads = [
            threading.Thread(target=self._ask, args=(request,), name=f"client {number}")
            for number, request in enumerate(self.requests)
        ]

    @property
    def streams(self) -> list[Request]:
        return [request for request in self.requests if request.stream]

    @property
    def plain(self) -> list[Request]:
        return [request for request in self.requests if not request.stream]

    def wait_begun(self, deadline_s: float = 60.0) -> None:
        """Until every stream has brought its first token."""
        wait_until(lambda: all(request.began for request in self.streams), deadline_s, "all streams to begin")

    def wait_ended(self, deadline_s: float = REQUEST_LIMIT_S) -> None:
        """Until every client knows how its request ended."""
        wait_until(
            lambda: all(request.ended_at is not None for request in self.requests), deadline_s, "all answers"
        )

    def _ask(self, request: Request) -> None:
        body = {
            "model": NAME,
            "prompt": "Once upon a time",
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": request.stream,
        }
        connection = http.client.HTTPConnection(
            self._address.hostname or "", self._address.port, timeout=REQUEST_LIMIT_S
        )
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            request.status, request.headers = answer.status, dict(answer.getheaders())
            while line := answer.readline():
                request.body += line.decode()
                request.began = True
        except (OSError, http.client.HTTPException) as problem:
            request.broken = f"{type(problem).__name__}: {problem}"
        finally:
            request.ended_at = time.monotonic()
            connection.close()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(REQUEST_LIMIT_S)
