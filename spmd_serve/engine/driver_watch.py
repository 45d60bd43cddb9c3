"""The engine core's line to its host's watcher: its own errors go out, the job's verdict comes in."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from spmd_serve.config.job_spec import JobSpec
from spmd_serve.engine.vllm_compat import follow_engine_loop
from spmd_serve.liveness import RootCause, StatusEntry, WatcherLink
from spmd_serve.system.process import die_with_parent

_ENGINE_CORE_LOGGER = "vllm.v1.engine.core"


class DriverWatch:
    """A `WatcherLink` for one engine core, which also listens to what vLLM logs as its fatal error."""

    def __init__(self, link: WatcherLink, replica: int) -> None:
        self.link = link
        self._handler = _FatalLog(self, replica)
        logging.getLogger(_ENGINE_CORE_LOGGER).addHandler(self._handler)

    @classmethod
    def open(cls, spec: JobSpec, replica: int, on_failure: Callable[[str], None]) -> "DriverWatch":
        """Connect to the watcher; `on_failure` is called, from a thread, with the job's verdict."""
        die_with_parent(None)
        name = "engine core" if spec.layout.dp == 1 else f"engine core of replica {replica}"
        hello = {"kind": "engine", "name": name, "rank": None}

        def on_root_cause(root_cause: RootCause) -> None:
            on_failure(root_cause.cause)

        link = WatcherLink.connect(spec.watcher, hello, spec.join_timeout_s, on_root_cause=on_root_cause)
        return cls(link, replica)

    def follow(self, replies: Iterable[Any], ranks: Iterable[int]) -> list[Any]:
        """From now on note what the engine core's loop does.

        Returns the `replies` of `ranks` in a form in which it is also noted that one is waited for.
        """
        entry = self.link.entry
        follow_engine_loop(entry.works, entry.waits)
        return [AwaitedReplies(source, rank, entry) for source, rank in zip(replies, ranks, strict=True)]

    def failed(self, cause: str) -> None:
        """Report this engine core's own fatal error."""
        self.link.failed(cause)

    def close(self, normal: bool) -> None:
        """Let go; after a normal end the death of this process is no failure."""
        logging.getLogger(_ENGINE_CORE_LOGGER).removeHandler(self._handler)
        if normal:
            self.link.leaving()


class AwaitedReplies:
    """One rank's replies. That the driver waits for one is noted, and that it has come is progress."""

    def __init__(self, source: Any, rank: int, entry: StatusEntry) -> None:
        self._source, self._rank, self._entry = source, rank, entry
        self.shutdown = source.shutdown

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next reply; raises what `source` does."""
        works = self._entry.awaits(self._rank)
        try:
            return self._source.dequeue(timeout=timeout, indefinite=indefinite)
        finally:
            self._entry.replied(works)


class _FatalLog(logging.Handler):
    """vLLM has no hook for an engine core's fatal error, but logs it with the exception before it ends."""

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
