"""Words with torchrun's key-value store that never wait in silence, nor for ever. No torch in here."""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from spmd_serve.errors import PeerLost, SpmdError

Say = Callable[[str], None]
Answer = TypeVar("Answer")

FOREVER_S = 365 * 24 * 3600.0
"""Work takes as long as it takes: who dies or hangs meanwhile is the watcher's business, which ends us."""

FIRST_WORD_S = 3.0
NEXT_WORD_S = 10.0
_SILENT_S = 20.0
_A_DAY_S = 24 * 3600.0
_SHORTEST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.2

_log = logging.getLogger(__name__).warning


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""

    def get(self, key: str, /) -> bytes:
        """The value; waits for the key."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; its new value."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Several values at once."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write `desired` where the value is `expected`; the value afterwards."""


class Wait:
    """A wait that says after 3 s, and then every 10 s, what it waits for."""

    def __init__(self, say: Say, deadline: float) -> None:
        """`deadline`: a time.monotonic() value in seconds."""
        self._say = say
        self._deadline = deadline
        self._started = time.monotonic()
        self._next_word = self._started + FIRST_WORD_S
        self._pause = _SHORTEST_PAUSE_S

    @property
    def left(self) -> float:
        """Seconds to the deadline, negative after it."""
        return self._deadline - time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def pause(self, what: Callable[[], str]) -> None:
        """Sleep a little, at first less; `what` names what is waited for, and is asked only to say it."""
        if time.monotonic() >= self._next_word:
            left = f"; {max(self.left, 0):.0f} s left" if self.left < _A_DAY_S else ""
            self._say(f"waiting for {what()}{left}")
            self._next_word = time.monotonic() + NEXT_WORD_S
        time.sleep(min(self._pause, self.left) if self.left > 0 else self._pause)
        self._pause = min(self._pause * 1.3, _LONGEST_PAUSE_S)


def answered(call: Callable[[], Answer], seconds: float = _SILENT_S) -> Answer:
    """Result of a call to a store; PeerLost when the store is gone, or silent for so many seconds.

    A store client waits for its server for ever, in C++, where no signal handler runs. So a thread of its own
    makes the call; when the server is stopped or cut off, the thread is left behind.
    """
    box: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            box.put((call(), None))
        except Exception as error:
            box.put((None, error))

    threading.Thread(target=run, name="store-call", daemon=True).start()
    try:
        value, error = box.get(timeout=max(seconds, 0.1))
    except queue.Empty:
        raise PeerLost(
            f"torchrun's store has been silent for {seconds:.0f} s: its host, or the network to it, is down"
        ) from None
    if isinstance(error, RuntimeError):
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise PeerLost(
            f"torchrun's store is gone ({reason}): see the log of the node that served it"
        ) from error
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def put_json(store: Store, key: str, value: object) -> None:
    """Write a value as JSON."""
    answered(lambda: store.set(key, json.dumps(value)))


def get_json(store: Store, key: str, timeout_s: float, what: str, for_whom: str, say: Say = _log) -> Any:
    """Wait for a key, read its JSON; PeerLost after `timeout_s` says that `what` of `for_whom` never came."""
    wait_keys(store, {key: for_whom}, time.monotonic() + timeout_s, say, what=what)
    return json.loads(answered(lambda: store.get(key)))


def wait_keys(
    store: Store,
    keys: Mapping[str, str],
    deadline: float,
    say: Say,
    *,
    what: str = "a sign",
    error: type[SpmdError] = PeerLost,
) -> None:
    """Wait until all keys exist; `keys` says of each whose it is, `what` what it stands for.

    At `deadline` (time.monotonic(), seconds) raises `error`, which names whose are missing.
    """
    wait = Wait(say, deadline)
    missing = dict(keys)
    while True:
        present = answered(lambda: [key for key in missing if store.check([key])])
        for key in present:
            del missing[key]
        if not missing:
            return
        if wait.left <= 0:
            raise error(
                f"{what} of {_names(missing)} did not come within {wait.waited:.0f} s: see their logs"
            )
        wait.pause(lambda: f"{what} of {_names(missing)}")


def _names(missing: Mapping[str, str]) -> str:
    names = list(dict.fromkeys(missing.values()))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
