"""Whether all endpoints of the job admit requests, and how long that took after a failure."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from spmd_serve.liveness.protocol import RootCause
from spmd_serve.wire.lines import Message

_FILE = "spmd_serve.failures"


class Serving:
    """Counted on the head, which tells the other nodes."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: where the rounds of this node keep the history of failures for the next round."""
        self.all = False
        """Whether all endpoints admit requests."""
        self.history: dict[str, Any] = {}
        """failures: rounds of this job that have failed; last: the root cause of the last one; recover_s:
        seconds from then until all endpoints served again."""
        self._parts: set[int] = set()
        self._file = folder / _FILE if folder is not None else None
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                self.history = dict(json.loads(self._file.read_text()))

    def record_failure(self, root_cause: RootCause) -> None:
        """Keep the failure for the next round. If the disk is full, only these numbers are lost."""
        if self._file is not None:
            count = int(self.history.get("failures", 0)) + 1
            with contextlib.suppress(OSError):
                self._file.write_text(json.dumps({"failures": count, "last": root_cause.to_json()}))

    def on_endpoint(self, message: Message) -> bool:
        """Record that an endpoint admits requests; return True if it was the last one to do so."""
        self._parts.add(int(message["part"]))
        if self.all or len(self._parts) < int(message["of"]):
            return False
        self.all = True
        if self.history.get("last") is not None:
            self.history["recover_s"] = round(time.time() - self.history["last"]["detected_at"], 3)
        return True

    def on_all(self, message: Message) -> None:
        """Handle the head's message that all endpoints admit requests."""
        self.all, self.history = True, dict(message["history"])

    def event(self) -> Message:
        """Return the message with which the head tells the other nodes."""
        return {"t": "all-serve", "history": self.history}
