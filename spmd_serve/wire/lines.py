"""Lines between processes: newline-delimited JSON, each line authenticated where a key is set."""

import hashlib
import hmac
import json
from typing import Any

from spmd_serve.errors import SpmdError

Message = dict[str, Any]
"""One line: a JSON object whose "t" says what kind of message it is."""

MAX_LINE = 4 << 20
"""Bytes; a longer line is garbage."""
_TAG_LENGTH = 64


class BadLine(SpmdError):
    """A line that no process of this job has written."""


def pack(message: Message) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def unpack(line: bytes) -> Message:
    """Inverse of `pack`, for a line without its newline; raises BadLine."""
    try:
        message = json.loads(line)
    except ValueError as problem:
        raise BadLine(f"not JSON: {line[:60]!r}") from problem
    except RecursionError as problem:
        raise BadLine("nested too deep") from problem
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise BadLine(f"no message of ours: {line[:60]!r}")
    return message


class LineBuffer:
    """Puts a stream's pieces together to lines."""

    def __init__(self, longest: int = MAX_LINE) -> None:
        self.longest = longest
        self._whole: list[bytes] = []
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take in what has come; raises BadLine when a line grows too long."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._whole += whole
        if max(map(len, (*whole, self._rest))) > self.longest:
            raise BadLine(f"a line longer than {self.longest} bytes")

    def take(self) -> list[bytes]:
        """The lines that are complete, without newlines, each once."""
        whole, self._whole = self._whole, []
        return whole


class Seal:
    """Authenticates the lines of one connection in both directions, if there is a key.

    The tag is an HMAC-SHA256 over direction, a counter and the line, so lines can't be forged, replayed,
    dropped, reordered or sent back. `mix` lets both sides' fresh nonces into the key, so a recorded
    connection can't be replayed.
    """

    def __init__(self, key: str | None, mine: str, theirs: str) -> None:
        self._key = None if key is None else key.encode()
        self._mine = mine.encode()
        self._theirs = theirs.encode()
        self._sent = 0
        self._received = 0

    def mix(self, nonce: str) -> None:
        """Both sides call this with the same nonces in the same order."""
        if self._key is not None:
            self._key = hmac.digest(self._key, b"nonce " + nonce.encode(), hashlib.sha256)

    def wrap(self, message: Message) -> bytes:
        """The line to send; each is sent once, in this order."""
        line = pack(message)
        if self._key is None:
            return line
        self._sent += 1
        return self._tag(self._mine, self._sent, line[:-1]) + line

    def open(self, line: bytes) -> Message:
        """The message of a received line; raises BadLine for a forged or garbled one."""
        if self._key is None:
            return unpack(line)
        self._received += 1
        tag, body = line[:_TAG_LENGTH], line[_TAG_LENGTH:]
        if not hmac.compare_digest(tag, self._tag(self._theirs, self._received, body)):
            raise BadLine("a line that is not authenticated with our key")
        return unpack(body)

    def _tag(self, direction: bytes, number: int, body: bytes) -> bytes:
        assert self._key is not None
        text = b"%s %d " % (direction, number) + body
        return hmac.digest(self._key, text, hashlib.sha256).hex().encode()
