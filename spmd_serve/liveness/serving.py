"""Whether all endpoints of the job take requests, and how long that took after a failure."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from spmd_serve.liveness.protocol import RootCause
from spmd_serve.wire.lines import Message

_FILE = "spmd_serve.failures"


class Serving:
    """Counted on the head, which tells the other hosts."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: where this host's rounds leave word for the next one."""
        self.all = False
        """Whether all endpoints take requests."""
        self.history: dict[str, Any] = {}
        """failures: rounds of this job that have failed; last: the verdict of the last one; recover_s:
        seconds from that verdict until all endpoints served again."""
        self._parts: set[int] = set()
        self._file = folder / _FILE if folder is not None else None
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                self.history = dict(json.loads(self._file.read_text()))

    def failed(self, root_cause: RootCause) -> None:
        """Leave word for the next round. Nothing is lost but numbers where the disk is full."""
        if self._file is not None:
            count = int(self.history.get("failures", 0)) + 1
            with contextlib.suppress(OSError):
                self._file.write_text(json.dumps({"failures": count, "last": root_cause.to_json()}))

    def hear(self, message: Message) -> bool:
        """An endpoint takes requests; True when this was the last one to do so."""
        self._parts.add(int(message["part"]))
        if self.all or len(self._parts) < int(message["of"]):
            return False
        self.all = True
        if self.history.get("last") is not None:
            self.history["recover_s"] = round(time.time() - self.history["last"]["detected_at"], 3)
        return True

    def hear_all(self, message: Message) -> None:
        """On another host: the head says that all do."""
        self.all, self.history = True, dict(message["history"])

    def events(self) -> Message:
        """What the head tells."""
        return {"t": "all-serve", "history": self.history}
