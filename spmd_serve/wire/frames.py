"""The frames of the control channel: bytes <-> a checked header and its payload. Standard library only.

Layout (little endian): magic "SP", version, kind, 1 if signed else 0 (u32), sequence number (u64), payload
length (u64); if signed, 32 bytes of HMAC-SHA256 over header and payload; then the payload. The key of that
HMAC is derived from the control key, the run's generation and the direction: a frame of another run, or one
sent back to where it came from, does not verify. The sequence number refuses a replay inside a run.
"""

import enum
import hmac
import struct
from collections.abc import Sequence
from typing import NamedTuple

from spmd_serve.errors import SpmdError

MAGIC = b"SP"
VERSION = 1
MAC_BYTES = 32
DEFAULT_MAX_BYTES = 1 << 30
HEADER = struct.Struct("<2sBBIQQ")

Buffer = bytes | bytearray | memoryview


class BadFrame(SpmdError):
    """What arrived is not the frame that was due: torn, oversized, repeated, forged or of another version."""


class MessageTooLong(SpmdError):
    """A message is longer than the channel's limit. Nothing of it was sent, the channel goes on."""


class Kind(enum.IntEnum):
    """What a frame is for."""

    MESSAGE = 1  # the payload follows inline
    BIG = 2  # announces a payload that follows apart, in one piece
    HEARTBEAT = 3
    STOP = 4  # the sender ends the channel in order
    HELLO = 5
    WELCOME = 6


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """A checked header; `raw` is kept because the HMAC covers it."""

    kind: Kind
    seq: int
    length: int
    raw: bytes


class Seal:
    """Signs and verifies one direction of one channel; without a key it is empty and accepts everything."""

    def __init__(self, key: bytes | None, nonce: str, direction: str) -> None:
        if key is not None and not key:
            raise ValueError("the control key is empty")
        context = f"{len(nonce)}:{nonce}/{direction}".encode()
        self._key = None if key is None else hmac.digest(key, context, "sha256")
        self.size = 0 if key is None else MAC_BYTES

    def mac(self, *parts: Buffer) -> bytes:
        """The signature over `parts` as if they were one piece; b"" without a key."""
        if self._key is None:
            return b""
        if sum(map(len, parts)) <= 1 << 16:
            return hmac.digest(self._key, b"".join(parts), "sha256")
        running = hmac.new(self._key, digestmod="sha256")  # long payloads are not copied for it
        for part in parts:
            running.update(part)
        return running.digest()

    def verifies(self, mac: Buffer, *parts: Buffer) -> bool:
        """Whether `mac` is the signature over `parts`."""
        return self._key is None or hmac.compare_digest(bytes(mac), self.mac(*parts))


class FrameWriter:
    """Numbers and signs the frames of one direction."""

    def __init__(self, seal: Seal, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.seal = seal
        self.max_bytes = max_bytes
        self.seq = 0
        self.overhead = HEADER.size + seal.size

    def frame(self, kind: Kind, parts: Sequence[Buffer] = ()) -> bytes:
        """Header and signature for a frame whose payload is `parts`; the payload itself is not copied.

        Raises MessageTooLong when the payload is longer than `max_bytes`.
        """
        length = sum(map(len, parts))
        head = self._header(kind, length)
        mac = self.seal.mac(head, *parts)
        self.seq += 1
        return head + mac

    def announcement(self, body: Buffer) -> bytes:
        """A whole BIG frame: its inline part is the signature of the body, which travels bare.

        The announcement is signed by itself too, so that its length is trusted before memory is set aside.
        """
        head = self._header(Kind.BIG, len(body))
        body_mac = self.seal.mac(head, body)
        self.seq += 1
        return head + self.seal.mac(head, body_mac) + body_mac

    def _header(self, kind: Kind, length: int) -> bytes:
        if length > self.max_bytes:
            raise MessageTooLong(
                f"a control message of {length} bytes is longer than the limit of {self.max_bytes}"
            )
        return HEADER.pack(MAGIC, VERSION, kind, self.seal.size > 0, self.seq, length)


class FrameReader:
    """Checks the frames of one direction, in order. `peer` says in errors who sent them."""

    def __init__(self, seal: Seal, peer: str, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.seal = seal
        self.peer = peer
        self.max_bytes = max_bytes
        self.seq = 0
        self.overhead = HEADER.size + seal.size

    def header(self, raw: Buffer) -> Header:
        """The header in the first bytes of `raw`; BadFrame unless it is exactly the one that is due."""
        if len(raw) < HEADER.size:
            raise self.bad(f"{len(raw)} bytes are no header")
        magic, version, kind, signed, seq, length = HEADER.unpack_from(raw)
        if magic != MAGIC:
            raise self.bad("it does not start with the magic number: not our protocol, or the stream is torn")
        if version != VERSION:
            raise self.bad(
                f"protocol version {version}, this side speaks {VERSION}: install one version everywhere"
            )
        if kind not in _KINDS:
            raise self.bad(f"unknown kind {kind}")
        if signed != (self.seal.size > 0):
            here, there = ("has none", "has one") if signed else ("has one", "has none")
            raise self.bad(f"this side {here}, the other {there}: give every host the same control key")
        if seq != self.seq:
            raise self.bad(
                f"sequence number {seq} where {self.seq} was due: a frame was lost, repeated or forged"
            )
        if length > self.max_bytes:
            raise self.bad(f"it announces {length} bytes, the limit is {self.max_bytes}")
        self.seq += 1
        return Header(_KINDS[kind], seq, length, bytes(raw[: HEADER.size]))

    def verify(self, header: Header, mac: Buffer, *parts: Buffer) -> None:
        """BadFrame unless `mac` signs the header and `parts`."""
        if not self.seal.verifies(mac, header.raw, *parts):
            raise self.bad("its signature is wrong: is the control key the same on every host?", header.seq)

    def inline(self, frame: memoryview) -> tuple[Header, bytes]:
        """Header and inline payload of a frame of fixed size; for BIG the payload is the body's signature."""
        header = self.header(frame)
        start = self.overhead
        length = self.seal.size if header.kind is Kind.BIG else header.length
        if length > len(frame) - start:
            raise self.bad(f"{length} bytes of payload do not fit into a frame of {len(frame)}", header.seq)
        payload = bytes(frame[start : start + length])
        self.verify(header, frame[HEADER.size : start], payload)
        return header, payload

    def bad(self, why: str, seq: int | None = None) -> BadFrame:
        """The error for a frame that is refused for `why`."""
        return BadFrame(f"bad control frame {self.seq if seq is None else seq} from {self.peer}: {why}")
