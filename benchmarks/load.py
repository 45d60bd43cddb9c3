"""A closed loop of streaming clients that costs little CPU, and what it measures.

On a machine with few cores the load generator competes with the server. So while a round runs, received bytes
are only kept with their time of arrival; HTTP chunks, events and JSON are taken apart after the round.
The measures are those of `vllm bench serve --max-concurrency`, with its definitions.
"""

import asyncio
import json
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

LAST_CHUNK = b"0\r\n\r\n"
ERROR_BODY_S = 0.5  # how long the rest of an error answer may take


class LoadError(Exception):
    """A request failed, or its answer was not what was asked for."""


@dataclass(frozen=True)
class Shape:
    """One configuration of load; lengths are tokens."""

    clients: int
    prompt_tokens: int
    output_tokens: int
    requests_per_client: int

    @property
    def name(self) -> str:
        plural = "" if self.clients == 1 else "s"
        return f"{self.clients} client{plural}, {self.prompt_tokens} prompt tokens"

    def prompts(self, seed: str, token_ids: range) -> list[list[int]]:
        """Random token ids, the same for the same seed: all sides get the same, and no prefix comes twice."""
        source = random.Random(f"{seed}/{self}")
        count = self.clients * self.requests_per_client
        return [source.choices(token_ids, k=self.prompt_tokens) for _ in range(count)]


@dataclass(frozen=True)
class Answer:
    """One answered request: times are seconds of the performance counter."""

    sent: float
    token_times: list[float]  # one per event that carried tokens
    output_tokens: int
    text: str

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def latency(self) -> float:
        return self.token_times[-1] - self.sent


@dataclass(frozen=True)
class Load:
    """One round of load: durations are seconds, measures are named with their unit."""

    duration_s: float
    client_cpu_s: float
    measures: dict[str, float]
    texts: list[str]
    requests: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _Raw:
    sent: float
    segments: list[tuple[float, bytes]]


async def drive(port: int, model: str, prompts: Sequence[list[int]], shape: Shape, deadline_s: float) -> Load:
    """Sends the prompts from `shape.clients` clients, each one at a time; LoadError where one fails."""
    bodies = [request_body(port, model, prompt, shape.output_tokens) for prompt in prompts]
    raws: list[_Raw | None] = [None] * len(bodies)
    queue = iter(enumerate(bodies))

    async def client(connection: "_Connection") -> None:
        for number, body in queue:
            raws[number] = await connection.ask(body)

    try:
        async with asyncio.timeout(deadline_s):
            connections = [await _Connection.open(port) for _ in range(min(shape.clients, len(bodies)))]
            cpu, start = time.process_time(), time.perf_counter()
            try:
                await asyncio.gather(*map(client, connections))
                duration, cpu = time.perf_counter() - start, time.process_time() - cpu
            finally:
                for connection in connections:
                    connection.close()
    except TimeoutError:
        missing = sum(raw is None for raw in raws)
        raise LoadError(f"{missing} of {len(bodies)} requests unanswered after {deadline_s:g} s") from None
    except OSError as error:
        raise LoadError(f"cannot connect to port {port}: {error}") from error
    answers = [parse(raw, shape) for raw in raws if raw is not None]
    return Load(
        duration,
        cpu,
        measures(answers, shape, duration),
        [answer.text for answer in answers],
        [{"ttft_s": one.ttft, "latency_s": one.latency, "tokens": one.output_tokens} for one in answers],
    )


def request_body(port: int, model: str, prompt: list[int], output_tokens: int) -> bytes:
    """A whole HTTP/1.1 request for a greedy streamed completion of exactly `output_tokens` tokens."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Connection(asyncio.Protocol):
    """One kept-alive connection with at most one request on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._segments: list[tuple[float, bytes]] = []
        self._tail = b""

    @classmethod
    async def open(cls, port: int) -> "_Connection":
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    async def ask(self, request: bytes) -> _Raw:
        assert self._transport is not None
        self._segments, self._tail = [], b""
        self._answered = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise LoadError("the server closed the connection between two requests")
        sent = time.perf_counter()
        self._transport.write(request)
        await self._answered
        return _Raw(sent, self._segments)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, so it can't be asserted

    def data_received(self, data: bytes) -> None:
        self._segments.append((time.perf_counter(), data))
        # No event ends like this: each ends with two newlines, so only the end of the answer does.
        self._tail = (self._tail + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        if self._tail == LAST_CHUNK:
            self._end(None)
        elif len(self._segments) == 1 and not data.startswith(b"HTTP/1.1 200"):
            asyncio.get_running_loop().call_later(ERROR_BODY_S, self._refused)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(LoadError(f"the server closed the connection in the middle of an answer ({error})"))

    def _refused(self) -> None:
        said = b"".join(data for _, data in self._segments).decode(errors="replace")
        self._end(LoadError(f"the server answered {said[:1000]}"))

    def _end(self, error: LoadError | None) -> None:
        if self._answered is None or self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)


def parse(raw: _Raw, shape: Shape) -> Answer:
    """Takes a streamed answer apart; LoadError where it has not exactly the tokens that were asked for."""
    times: list[float] = []
    texts: list[str] = []
    usage: dict[str, int] = {}
    for when, message in _messages(raw.segments):
        content = message.removeprefix(b"data: ")
        if message.startswith(b":") or content == b"[DONE]":
            continue
        event = json.loads(content)
        if "error" in event:
            raise LoadError(f"the server answered {event['error']}")
        if choices := event.get("choices"):
            times.append(when)
            texts.append(choices[0].get("text") or "")
        usage = event.get("usage") or usage
    expected = (shape.prompt_tokens, shape.output_tokens)
    found = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if found != expected or not times:
        raise LoadError(f"(prompt, output) tokens should have been {expected}, the server counted {found}")
    return Answer(raw.sent, times, shape.output_tokens, "".join(texts))


def _messages(segments: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The server-sent events of a chunked answer, each with the time at which its last byte was there."""
    data = b"".join(segment for _, segment in segments)
    ends = list(accumulate(len(segment) for _, segment in segments))
    position = data.index(b"\r\n\r\n") + 4
    pending = b""
    while True:
        line_end = data.index(b"\r\n", position)
        size = int(data[position:line_end], 16)
        if size == 0:
            return
        end = line_end + 2 + size
        pending += data[line_end + 2 : end]
        position = end + 2
        when = segments[bisect_left(ends, end)][0]
        while b"\n\n" in pending:
            message, _, pending = pending.partition(b"\n\n")
            yield when, message


def measures(answers: Sequence[Answer], shape: Shape, duration_s: float) -> dict[str, float]:
    """What a round gave, as `vllm bench serve` defines it: throughputs per second, latencies in ms."""
    output = sum(answer.output_tokens for answer in answers)
    found = {
        "requests/s": len(answers) / duration_s,
        "output tokens/s": output / duration_s,
        "total tokens/s": (output + shape.prompt_tokens * len(answers)) / duration_s,
    }
    gaps = [
        after - before
        for answer in answers
        for before, after in zip(answer.token_times, answer.token_times[1:], strict=False)
    ]
    found |= spread("TTFT", [answer.ttft for answer in answers])
    found |= spread("TPOT", [(one.latency - one.ttft) / max(one.output_tokens - 1, 1) for one in answers])
    found |= spread("ITL", gaps)
    found |= spread("E2E", [answer.latency for answer in answers])
    return found


def spread(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Mean, median and 99th percentile in milliseconds; zeros where there is no value."""
    values = sorted(1000 * value for value in seconds) or [0.0]
    return {
        f"{name} mean ms": statistics.fmean(values),
        f"{name} median ms": statistics.median(values),
        f"{name} p99 ms": percentile(values, 99),
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolated between neighbours, as numpy does."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
