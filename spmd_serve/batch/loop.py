"""Batch loop: read lines, keep a bounded number in flight, write answers as they finish."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from spmd_serve.batch import prepare as preparation
from spmd_serve.batch.options import BatchOptions
from spmd_serve.batch.prepare import Launch, Prepared
from spmd_serve.batch.progress import BatchProgress, display_for
from spmd_serve.batch.prompts import parse_prompt, plain_output
from spmd_serve.batch.records import Record
from spmd_serve.batch.request_lines import (
    BadRequestLine,
    BatchLine,
    RequestOutcome,
    bad_line_output,
    crash_output,
    encode,
    outcome_of,
    parse_line,
    with_line_number,
)
from spmd_serve.batch.seen import IdTable, digest_of
from spmd_serve.errors import ExitCode, SpmdError, UsageError
from spmd_serve.system.signals import Echo

Answer = Callable[[BatchLine], Awaitable[dict[str, Any]]]
"""Return the OpenAI output object (id, custom_id, response, error) of one line.

An SpmdError from it ends the run; any other exception becomes this line's error.
"""

WINDOW = 512
"""Default number of lines in flight."""

SYNC_INTERVAL_S = 0.5
DRAIN_S = 5.0
"""Seconds that answers in flight get to finish after SIGTERM (torchrun kills after 30)."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A line to answer. `place` counts lines without gaps; `fields` are copied into a plain answer."""

    place: int
    line: BatchLine | BadRequestLine
    digest: int
    fields: Mapping[str, Any]


async def run_batch(
    answer: Answer,
    options: BatchOptions,
    *,
    prepared: Prepared | None = None,
    window: int = WINDOW,
    drain_s: float = DRAIN_S,
    say: Callable[[str], None] = preparation.say,
) -> ExitCode:
    """Answer every line that has no answer yet. `prepared` defaults to `prepare(options)`, and is closed.

    SIGTERM and SIGINT (in a main thread) stop the run: lines in flight get `drain_s` seconds to finish, the
    rest is dropped. Return OK, LINES_FAILED (all lines are written, some with an error), or STOPPED (by a
    signal or --max-errors; the same command continues). Raises SpmdError if the run cannot continue, for
    example on a full disk; finished answers are kept.
    """
    prepared = prepared or preparation.prepare(options, launch=Launch(), say=say)
    run = _Run(answer, prepared, options.max_in_flight or window, say)
    with run.signals():
        try:
            return await run.until_end(drain_s)
        finally:
            prepared.close()


async def finish_batch(prepared: Prepared, *, say: Callable[[str], None] = preparation.say) -> ExitCode:
    """Sort, upload and summarize an output whose lines are all answered; needs no engine.

    Handles no signals: every step can be repeated.
    """
    assert prepared.is_complete

    async def nobody(line: BatchLine) -> dict[str, Any]:
        raise AssertionError(f"line {line.number} has no answer")

    try:
        return await _Run(nobody, prepared, WINDOW, say).until_end(DRAIN_S)
    finally:
        prepared.close()


class _Run:
    def __init__(self, answer: Answer, prepared: Prepared, window: int, say: Callable[[str], None]) -> None:
        self._answer = answer
        self._prepared = prepared
        self._options = prepared.options
        self._source = prepared.source
        self._output = prepared.output
        self._say = say
        self._entries = asyncio.Semaphore(window)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._echo = Echo()
        self._fatal: SpmdError | None = None
        restored = len(self._output.done)
        self._progress = BatchProgress(prepared.total, restored, self._output.failed)

    async def until_end(self, drain_s: float) -> ExitCode:
        work = asyncio.create_task(self._process_all())
        stopped = asyncio.create_task(self._stop.wait())
        background = [
            asyncio.create_task(self._sync_periodically()),
            asyncio.create_task(self._show_progress()),
        ]
        self._check_errors()
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._drain(work, 0.0 if self._fatal else drain_s)
            for task in (stopped, *background):
                await _end(task)
            return await self._exit_code(work)
        finally:
            for task in (work, stopped, *background, *self._in_flight):
                await _end(task)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Stop the run on SIGTERM and SIGINT, if this is the main thread."""
        loop = asyncio.get_running_loop()
        set_here = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(RuntimeError, ValueError):
                loop.add_signal_handler(number, self._on_signal, number)
                set_here.append(number)
        try:
            yield
        finally:
            for number in set_here:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._echo.heard():
            return
        if self._stop.is_set():  # second signal: cancel the lines in flight
            for task in self._in_flight:
                task.cancel()
        self._stop_because(f"stopped by {number.name}")

    def _stop_because(self, why: str) -> None:
        if not self._stop.is_set():
            self._stop_reason = why
            self._stop.set()

    async def _process_all(self) -> None:
        async for item in self._items():
            await self._entries.acquire()
            task = asyncio.create_task(self._process(item))
            self._in_flight.add(task)
            task.add_done_callback(self._finished)
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._entries.release()
        problem = None if task.cancelled() else task.exception()
        # While stopping, an error of a line in flight is expected: the engine may have ended.
        if problem is not None and not self._stop.is_set():
            self._fatal = _as_spmd_error(problem)
            self._stop_because(str(problem))

    async def _drain(self, work: asyncio.Task[None], drain_s: float) -> None:
        """Stop reading lines, and wait up to `drain_s` seconds for those in flight."""
        await _end(work)
        if self._in_flight and drain_s > 0:
            self._say(
                f"{self._stop_reason}: {len(self._in_flight)} lines in flight get {drain_s:g} s to finish"
            )
            await asyncio.wait(self._in_flight, timeout=drain_s)
        for task in list(self._in_flight):
            await _end(task)

    async def _items(self) -> AsyncIterator[_Item]:
        """Yield the lines to answer. Read finished lines too, because their ids are in use."""
        ids, plain, place, last = IdTable(), self._options.is_plain, 0, 0
        done = self._output.done
        async for number, raw in self._source.lines():
            last = number
            is_done = number in done
            if plain and is_done and not self._source.is_pipe:
                continue
            digest = 0 if is_done and not self._source.is_pipe else digest_of(raw.strip())
            if is_done and self._output.digest_of(number) not in (None, digest):
                raise UsageError(
                    f"line {number} of {self._source.name} is not what was answered as line {number} before: "
                    "give the same input, or --restart begins anew"
                )
            line, fields = (
                parse_prompt(number, raw, self._options) if plain else (parse_line(number, raw), {})
            )
            if not plain:
                line = _refuse_duplicate(line, ids)
            if not is_done:
                yield _Item(place, line, digest, fields)
                place += 1
        if last < done.highest():
            raise UsageError(
                f"{self._source.name} ended at line {last}, but line {done.highest()} was answered before: "
                "give the same input, or --restart begins anew"
            )

    async def _process(self, item: _Item) -> None:
        output = await self._request(item.line)
        outcome = outcome_of(output)
        if outcome.failed:
            output = with_line_number(output, item.line.number)
        try:
            payload = encode(self._output_line(item, output))
        except (ValueError, TypeError, KeyError) as problem:
            assert isinstance(item.line, BatchLine)
            output = with_line_number(crash_output(item.line, problem), item.line.number)
            outcome, payload = RequestOutcome(True, 0, 0), encode(self._output_line(item, output))
        record = Record.of(item.line.number, item.digest, payload, failed=outcome.failed)
        await self._output.put(item.place, record, payload)
        self._progress.note(outcome)
        if outcome.failed:
            self._check_errors()

    async def _request(self, line: BatchLine | BadRequestLine) -> dict[str, Any]:
        if isinstance(line, BadRequestLine):
            return bad_line_output(line)
        try:
            return await self._answer(line)
        except SpmdError:
            raise
        except Exception as problem:
            return crash_output(line, problem)

    def _output_line(self, item: _Item, output: dict[str, Any]) -> dict[str, Any]:
        if not self._options.is_plain:
            return output
        return plain_output(item.line.number, item.fields, output, self._options)

    def _check_errors(self) -> None:
        limit = self._options.max_errors
        if limit is not None and self._progress.failed > limit:
            self._stop_because(f"stopped: {self._progress.failed} lines failed, --max-errors is {limit}")

    async def _sync_periodically(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            try:
                await self._output.sync()
            except SpmdError as problem:
                self._fatal = self._fatal or problem
                self._stop_because(str(problem))
                return

    async def _show_progress(self) -> None:
        display = display_for(self._progress, self._say)
        try:
            while True:
                await asyncio.sleep(display.interval_s)
                display.update(self._progress)
        finally:
            display.close(self._progress)

    async def _exit_code(self, work: asyncio.Task[None]) -> ExitCode:
        problem = self._fatal or (None if work.cancelled() else work.exception())
        progress = self._progress
        if problem is not None:
            with suppress(SpmdError):
                await self._output.sync()
            raise problem
        if work.cancelled() and not self._prepared.is_complete:
            await self._output.sync()
            then = (
                "run the same command again to go on" if self._output.resumable else "what was written is all"
            )
            total = "" if progress.total is None else f" of {progress.total:,}"
            self._say(f"{self._stop_reason}; {progress.done:,}{total} lines are done: {then}")
            return ExitCode.STOPPED
        await self._output.finish()
        self._say(f"{self._output.name}: {progress.summary()}")
        return ExitCode.LINES_FAILED if progress.failed else ExitCode.OK


def _refuse_duplicate(line: BatchLine | BadRequestLine, ids: IdTable) -> BatchLine | BadRequestLine:
    """Turn a line whose id was used before into a bad line without the id, which the first line keeps."""
    if line.custom_id is None:
        return line
    first = ids.first_use(line.custom_id, line.number)
    if first is None:
        return line
    return BadRequestLine(line.number, f"custom_id {line.custom_id!r} was used before, on line {first}")


def _as_spmd_error(problem: BaseException) -> SpmdError:
    if isinstance(problem, SpmdError):
        return problem
    wrapped = SpmdError(f"{type(problem).__name__}: {problem}")
    wrapped.__cause__ = problem
    return wrapped


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; ignore its result."""
    task.cancel()
    if not task.done():
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
