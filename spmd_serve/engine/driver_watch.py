"""The engine core's connection to its node's watcher: report its errors, receive the job's root cause."""

import logging
from collections.abc import Callable, Iterable

from spmd_serve.channel.base import Inbox
from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.vllm_compat import follow_engine_loop
from spmd_serve.liveness import RootCause, StatusEntry, WatcherLink
from spmd_serve.system.process import die_with_parent

_ENGINE_CORE_LOGGER = "vllm.v1.engine.core"


class DriverWatch:
    """A `WatcherLink` for one engine core; also reports the fatal error that vLLM logs."""

    def __init__(self, link: WatcherLink, replica: int) -> None:
        self.link = link
        self._handler = _FatalLog(self, replica)
        logging.getLogger(_ENGINE_CORE_LOGGER).addHandler(self._handler)

    @classmethod
    def open(cls, spec: JobSpec, replica: int, on_failure: Callable[[str], None]) -> "DriverWatch":
        """Connect to the watcher; a thread calls `on_failure` with the root cause when the job fails."""
        die_with_parent(None)
        name = "engine core" if spec.layout.dp == 1 else f"engine core of replica {replica}"
        hello = {"kind": "engine", "name": name, "rank": None}

        def on_root_cause(root_cause: RootCause) -> None:
            on_failure(root_cause.cause)

        link = WatcherLink.connect(spec.watcher, hello, spec.join_timeout_s, on_root_cause=on_root_cause)
        return cls(link, replica)

    def follow(self, replies: Iterable[Inbox], ranks: Iterable[int]) -> list[Inbox]:
        """Record from now on when the engine core's loop works and when it waits.

        Return the `replies` of `ranks`, wrapped so that waiting for a reply is recorded too.
        """
        entry = self.link.entry
        follow_engine_loop(entry.works, entry.waits)
        return [AwaitedReplies(source, rank, entry) for source, rank in zip(replies, ranks, strict=True)]

    def failed(self, cause: str) -> None:
        """Report a fatal error of this engine core."""
        self.link.failed(cause)

    def close(self, normal: bool) -> None:
        """Close; after a `normal` end the watcher does not report the exit of this process."""
        logging.getLogger(_ENGINE_CORE_LOGGER).removeHandler(self._handler)
        if normal:
            self.link.leaving()


class AwaitedReplies:
    """The replies of one rank; records when the driver waits for one, and its arrival as progress."""

    def __init__(self, source: Inbox, rank: int, entry: StatusEntry) -> None:
        self._source, self._rank, self._entry = source, rank, entry

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> object:
        """Return the next reply; raise what the source raises."""
        works = self._entry.awaits(self._rank)
        try:
            return self._source.dequeue(timeout=timeout, indefinite=indefinite)
        finally:
            self._entry.replied(works)

    def wait_until_ready(self) -> None:
        """Return when the rank is connected."""
        self._source.wait_until_ready()

    def shutdown(self) -> None:
        """Wake a waiting dequeue."""
        self._source.shutdown()


class _FatalLog(logging.Handler):
    """Catches the fatal error of an engine core: vLLM has no hook for it, but logs it."""

    def __init__(self, watch: DriverWatch, replica: int) -> None:
        super().__init__(level=logging.ERROR)
        self._watch = watch
        self._replica = replica

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None or not record.getMessage().startswith("EngineCore"):
            return
        problem = record.exc_info[1]
        text = " ".join(str(problem).split())
        self._watch.failed(f"the engine core failed: {type(problem).__name__}: {text}")
