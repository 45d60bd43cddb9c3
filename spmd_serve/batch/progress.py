"""How far a run is: a bar on a terminal, a line every ten seconds elsewhere."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TextIO

from spmd_serve.batch.request_lines import RequestOutcome

LOG_INTERVAL_S = 10.0
BAR_INTERVAL_S = 0.5
_WINDOW_S = 60.0


class _Sample(NamedTuple):
    at: float
    answered: int
    tokens_in: int
    tokens_out: int


class Rates(NamedTuple):
    """Per second, over the last minute."""

    lines: float
    tokens_in: float
    tokens_out: float


@dataclass
class BatchProgress:
    """Counts of a run. `restored` lines (and their `failed`) come from earlier runs on this output."""

    total: int | None
    restored: int = 0
    failed: int = 0
    answered: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    clock: Callable[[], float] = time.monotonic
    _samples: deque[_Sample] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.began = self.clock()
        self._sample()

    @property
    def done(self) -> int:
        """Lines with an answer or an error, earlier runs included."""
        return self.restored + self.answered

    def note(self, outcome: RequestOutcome) -> None:
        """Count a line of this run."""
        self.answered += 1
        self.failed += outcome.failed
        self.tokens_in += outcome.tokens_in
        self.tokens_out += outcome.tokens_out

    def rates(self) -> Rates:
        """The speed of late; each call is also a sample, so call it from time to time."""
        now = self._sample()
        while len(self._samples) > 2 and self._samples[1].at <= now.at - _WINDOW_S:
            self._samples.popleft()
        then = self._samples[0]
        span = max(now.at - then.at, 1e-9)
        return Rates(*((new - old) / span for new, old in zip(now[1:], then[1:], strict=True)))

    def seconds_left(self, rates: Rates) -> float | None:
        """None where nobody can know."""
        if self.total is None or rates.lines <= 0:
            return None
        return max(self.total - self.done, 0) / rates.lines

    def line(self) -> str:
        """Everything in one line, for a log."""
        rates = self.rates()
        left = self.seconds_left(rates)
        total = "?" if self.total is None else f"{self.total:,}"
        percent = f" ({100 * self.done / self.total:.0f} %)" if self.total else ""
        return (
            f"{self.done:,}/{total} lines{percent}, {self.failed:,} failed, {rates.lines:.1f} lines/s, "
            f"{rates.tokens_in:,.0f} tokens/s in, {rates.tokens_out:,.0f} out"
            + (f", {_duration(left)} left" if left is not None else "")
        )

    def summary(self) -> str:
        """The last word."""
        took = max(self.clock() - self.began, 1e-9)
        earlier = f" ({self.restored:,} by earlier runs)" if self.restored else ""
        return (
            f"{self.done:,} lines{earlier}: {self.done - self.failed:,} answered, {self.failed:,} failed; "
            f"{_duration(took)}, {self.tokens_in:,} tokens in ({self.tokens_in / took:,.0f}/s), "
            f"{self.tokens_out:,} out ({self.tokens_out / took:,.0f}/s)"
        )

    def _sample(self) -> _Sample:
        sample = _Sample(self.clock(), self.answered, self.tokens_in, self.tokens_out)
        if not self._samples or sample.at > self._samples[-1].at:
            self._samples.append(sample)
        return sample


class Display(Protocol):
    """Shows a BatchProgress; `update` is called every `interval_s` seconds."""

    interval_s: float

    def update(self, progress: BatchProgress) -> None: ...
    def close(self, progress: BatchProgress) -> None: ...


class LogDisplay:
    """Plain lines."""

    interval_s = LOG_INTERVAL_S

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def update(self, progress: BatchProgress) -> None:
        self._say(progress.line())

    def close(self, progress: BatchProgress) -> None:
        """The summary of the run says it all."""


class BarDisplay:
    """A bar on a terminal."""

    interval_s = BAR_INTERVAL_S

    def __init__(self, progress: BatchProgress, stream: TextIO) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]  # its stubs are another package

        self._bar = tqdm(
            total=progress.total,
            initial=progress.done,
            file=stream,
            unit=" lines",
            dynamic_ncols=True,
            mininterval=0,
            smoothing=0.05,
        )

    def update(self, progress: BatchProgress) -> None:
        rates = progress.rates()
        self._bar.set_postfix_str(
            f"{progress.failed:,} failed, {rates.tokens_in:,.0f} tok/s in, {rates.tokens_out:,.0f} out",
            refresh=False,
        )
        if not self._bar.update(progress.done - self._bar.n):
            self._bar.refresh()

    def close(self, progress: BatchProgress) -> None:
        """Leaves the bar on the screen, as it is at the end."""
        self.update(progress)
        self._bar.close()


def display_for(progress: BatchProgress, say: Callable[[str], None], stream: TextIO | None = None) -> Display:
    """A bar where `stream` (standard error) is a terminal of some width, lines elsewhere."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0:
        return BarDisplay(progress, stream)
    return LogDisplay(say)  # a terminal without a width, as some containers give, would show nothing of a bar


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
