"""The run: lines in, a bounded number of them in the engine at a time, answers out as they are finished."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from spmd_serve.batch import prepare as preparation
from spmd_serve.batch.options import BatchOptions
from spmd_serve.batch.prepare import Launch, Prepared
from spmd_serve.batch.progress import Progress, display_for
from spmd_serve.batch.prompts import parse_prompt, plain_output
from spmd_serve.batch.records import Record
from spmd_serve.batch.request_lines import (
    BadLine,
    BatchLine,
    Outcome,
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
"""Gives the OpenAI output object (id, custom_id, response, error) of one line.

An SpmdError from it ends the run; any other exception becomes this line's error.
"""

WINDOW = 512
"""Lines in flight where nobody says."""

SYNC_EVERY_S = 0.5
DRAIN_S = 5.0
"""Seconds that answers in flight get to finish after SIGTERM (torchrun kills after 30)."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A line to do. `place` counts lines without gaps, `fields` come back with a plain prompt's answer."""

    place: int
    line: BatchLine | BadLine
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
    """Answer every line that has no answer yet. `prepared` is made of the options where it is not given.

    It is closed at the end. SIGTERM and SIGINT (in a main thread) stop it: `drain_s` seconds for what is in
    flight, the rest is dropped. Returns OK, LINES_FAILED (all lines are there, some with an error), or
    STOPPED by a signal or --max-errors: then the same command goes on. Raises SpmdError when it can't go on,
    a full disk for one; what was finished is kept.
    """
    prepared = prepared or preparation.prepare(options, launch=Launch(), say=say)
    run = _Run(answer, prepared, options.max_in_flight or window, say)
    with run.signals():
        try:
            return await run.until_end(drain_s)
        finally:
            prepared.close()


async def finish_batch(prepared: Prepared, *, say: Callable[[str], None] = preparation.say) -> ExitCode:
    """What is left to do without an engine when all lines are answered already: sort, upload, sum up.

    Handles no signals: whatever is cut here can be done again.
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
        self._flying: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._why = ""
        self._echo = Echo()
        self._fatal: SpmdError | None = None
        restored = len(self._output.done)
        self._progress = Progress(prepared.total, restored, self._output.failed)

    async def until_end(self, drain_s: float) -> ExitCode:
        work = asyncio.create_task(self._all())
        stopped = asyncio.create_task(self._stop.wait())
        beside = [asyncio.create_task(self._sync_often()), asyncio.create_task(self._show())]
        self._check_errors()
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._land(work, 0.0 if self._fatal else drain_s)
            for task in (stopped, *beside):
                await _end(task)
            return await self._root_cause(work)
        finally:
            for task in (work, stopped, *beside, *self._flying):
                await _end(task)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the run, where this thread may decide that."""
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
        if self._stop.is_set():  # told twice: no more waiting for what is in flight
            for task in self._flying:
                task.cancel()
        self._end_because(f"stopped by {number.name}")

    def _end_because(self, why: str) -> None:
        if not self._stop.is_set():
            self._why = why
            self._stop.set()

    async def _all(self) -> None:
        async for item in self._items():
            await self._entries.acquire()
            task = asyncio.create_task(self._one(item))
            self._flying.add(task)
            task.add_done_callback(self._landed)
        while self._flying:
            await asyncio.wait(self._flying)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        self._entries.release()
        problem = None if task.cancelled() else task.exception()
        # While stopping, the engine may go away under what is in flight: that is no news.
        if problem is not None and not self._stop.is_set():
            self._fatal = _as_spmd_error(problem)
            self._end_because(str(problem))

    async def _land(self, work: asyncio.Task[None], drain_s: float) -> None:
        """No new lines; those in flight get `drain_s` seconds."""
        await _end(work)
        if self._flying and drain_s > 0:
            self._say(f"{self._why}: {len(self._flying)} lines in flight get {drain_s:g} s to finish")
            await asyncio.wait(self._flying, timeout=drain_s)
        for task in list(self._flying):
            await _end(task)

    async def _items(self) -> AsyncIterator[_Item]:
        """The lines to do. Reads those that are done too: their ids are taken."""
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

    async def _one(self, item: _Item) -> None:
        output = await self._ask(item.line)
        outcome = outcome_of(output)
        if outcome.failed:
            output = with_line_number(output, item.line.number)
        try:
            payload = encode(self._shape(item, output))
        except (ValueError, TypeError, KeyError) as problem:
            assert isinstance(item.line, BatchLine)
            output = with_line_number(crash_output(item.line, problem), item.line.number)
            outcome, payload = Outcome(True, 0, 0), encode(self._shape(item, output))
        record = Record.of(item.line.number, item.digest, payload, failed=outcome.failed)
        await self._output.put(item.place, record, payload)
        self._progress.note(outcome)
        if outcome.failed:
            self._check_errors()

    async def _ask(self, line: BatchLine | BadLine) -> dict[str, Any]:
        if isinstance(line, BadLine):
            return bad_line_output(line)
        try:
            return await self._answer(line)
        except SpmdError:
            raise
        except Exception as problem:
            return crash_output(line, problem)

    def _shape(self, item: _Item, output: dict[str, Any]) -> dict[str, Any]:
        if not self._options.is_plain:
            return output
        return plain_output(item.line.number, item.fields, output, self._options)

    def _check_errors(self) -> None:
        limit = self._options.max_errors
        if limit is not None and self._progress.failed > limit:
            self._end_because(f"stopped: {self._progress.failed} lines failed, --max-errors is {limit}")

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            try:
                await self._output.sync()
            except SpmdError as problem:
                self._fatal = self._fatal or problem
                self._end_because(str(problem))
                return

    async def _show(self) -> None:
        display = display_for(self._progress, self._say)
        try:
            while True:
                await asyncio.sleep(display.every_s)
                display.update(self._progress)
        finally:
            display.close(self._progress)

    async def _root_cause(self, work: asyncio.Task[None]) -> ExitCode:
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
            self._say(f"{self._why}; {progress.done:,}{total} lines are done: {then}")
            return ExitCode.STOPPED
        await self._output.finish()
        self._say(f"{self._output.name}: {progress.summary()}")
        return ExitCode.LINES_FAILED if progress.failed else ExitCode.OK


def _refuse_duplicate(line: BatchLine | BadLine, ids: IdTable) -> BatchLine | BadLine:
    """A line whose id was used before becomes a bad one without the id: that is the first line's."""
    if line.custom_id is None:
        return line
    first = ids.first_use(line.custom_id, line.number)
    if first is None:
        return line
    return BadLine(line.number, f"custom_id {line.custom_id!r} was used before, on line {first}")


def _as_spmd_error(problem: BaseException) -> SpmdError:
    if isinstance(problem, SpmdError):
        return problem
    wrapped = SpmdError(f"{type(problem).__name__}: {problem}")
    wrapped.__cause__ = problem
    return wrapped


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel and wait; its outcome is somebody else's to read."""
    task.cancel()
    if not task.done():
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
