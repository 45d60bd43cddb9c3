"""Frames: what is written is read back, and everything else is refused with one clear line."""

import struct
from collections.abc import Callable

import pytest

from spmd_serve.wire import frames
from spmd_serve.wire.frames import HEADER, BadFrame, FrameReader, FrameWriter, Kind, MessageTooLong, Seal

KEY = b"a secret"


def pair(key: bytes | None = None, *, other: bytes | None = None) -> tuple[FrameWriter, FrameReader]:
    writer = FrameWriter(Seal(key, "run1", "out"), 1000)
    return writer, FrameReader(Seal(other or key, "run1", "out"), "the driver", 1000)


def padded(writer: FrameWriter, *parts: bytes, kind: Kind = Kind.MESSAGE, size: int = 300) -> memoryview:
    whole = writer.frame(kind, parts) + b"".join(parts)
    return memoryview(bytearray(whole.ljust(size, b"x")))


@pytest.mark.parametrize("key", [None, KEY])
def test_round_trip_in_order(key: bytes | None) -> None:
    writer, reader = pair(key)
    for number, payload in enumerate([b"", b"a", b"b" * 200]):
        header, inline = reader.inline(padded(writer, payload))
        assert (header.kind, header.seq, inline) == (Kind.MESSAGE, number, payload)
    header, inline = reader.inline(padded(writer, kind=Kind.HEARTBEAT))
    assert (header.kind, inline) == (Kind.HEARTBEAT, b"")


@pytest.mark.parametrize("key", [None, KEY])
def test_a_long_body_is_signed_in_its_announcement(key: bytes | None) -> None:
    writer, reader = pair(key)
    body = bytes(range(250)) * 4
    for _ in range(2):
        header, mac = reader.inline(memoryview(writer.announcement(body).ljust(300)))
        assert (header.kind, header.length) == (Kind.BIG, 1000)
        reader.verify(header, mac, body)
    if key:
        with pytest.raises(BadFrame, match="frame 1 from the driver: its signature is wrong"):
            reader.verify(header, mac, body[:-1] + b"!")


def change(place: int, value: bytes) -> Callable[[memoryview], None]:
    def apply(frame: memoryview) -> None:
        frame[place : place + len(value)] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (change(0, b"GE"), "magic"),
        (change(2, b"\x09"), r"version 9, this side speaks 1"),
        (change(3, b"\x63"), "unknown kind 99"),
        (change(3, b"\x00"), "unknown kind 0"),
        (change(4, b"\x02"), "give every host the same control key"),
        (change(8, struct.pack("<Q", 7)), "sequence number 7 where 0 was due"),
        (change(8, struct.pack("<Q", 1 << 63)), "sequence number"),
        (change(16, struct.pack("<Q", 1001)), "announces 1001 bytes, the limit is 1000"),
        (change(16, struct.pack("<Q", 290)), "290 bytes of payload do not fit"),
    ],
)
@pytest.mark.parametrize("key", [None, KEY])
def test_a_spoilt_frame_is_refused(key: bytes | None, spoil: Callable[[memoryview], None], why: str) -> None:
    writer, reader = pair(key)
    frame = padded(writer, b"payload")
    spoil(frame)
    with pytest.raises(BadFrame, match=why) as caught:
        reader.inline(frame)
    assert "\n" not in str(caught.value)
    assert "from the driver" in str(caught.value)


def test_a_header_cut_short_is_refused() -> None:
    writer, reader = pair()
    with pytest.raises(BadFrame, match="23 bytes are no header"):
        reader.header(writer.frame(Kind.MESSAGE)[: HEADER.size - 1])


@pytest.mark.parametrize("place", [3, 17, HEADER.size, HEADER.size + 31, HEADER.size + 32, HEADER.size + 38])
def test_with_a_key_no_changed_bit_passes(place: int) -> None:
    writer, reader = pair(KEY)
    frame = padded(writer, b"payload")
    frame[place] ^= 4
    with pytest.raises(BadFrame):
        reader.inline(frame)


def test_repeats_and_gaps_are_refused() -> None:
    writer, reader = pair(KEY)
    frames = [padded(writer, b"%d" % number) for number in range(4)]
    reader.inline(frames[0])
    with pytest.raises(BadFrame, match="sequence number 0 where 1 was due"):
        reader.inline(frames[0])
    with pytest.raises(BadFrame, match="sequence number 2 where 1 was due"):
        reader.inline(frames[2])


def test_another_key_run_or_direction_does_not_verify() -> None:
    frame = padded(FrameWriter(Seal(KEY, "run1", "out")), b"payload")
    for seal in (Seal(b"other", "run1", "out"), Seal(KEY, "run2", "out"), Seal(KEY, "run1", "back")):
        with pytest.raises(BadFrame, match="is the control key the same on every host"):
            FrameReader(seal, "rank 1").inline(frame)
    # nonce and direction cannot be shifted into each other
    assert Seal(KEY, "a", "/b").mac(b"x") != Seal(KEY, "a/", "b").mac(b"x")


def test_a_signed_frame_needs_its_key_and_an_unsigned_one_is_not_taken() -> None:
    unsigned = padded(FrameWriter(Seal(None, "run1", "out")), b"payload")
    with pytest.raises(BadFrame, match="this side has one, the other has none"):
        FrameReader(Seal(KEY, "run1", "out"), "rank 1").inline(unsigned)
    signed = padded(FrameWriter(Seal(KEY, "run1", "out")), b"payload")
    with pytest.raises(BadFrame, match="this side has none, the other has one"):
        FrameReader(Seal(None, "run1", "out"), "rank 1").inline(signed)
    with pytest.raises(ValueError, match="empty"):
        Seal(b"", "run1", "out")


def test_signature_does_not_depend_on_how_the_parts_are_cut() -> None:
    seal, long = Seal(KEY, "run1", "out"), bytes(200_000)
    assert seal.mac(b"ab", b"c") == seal.mac(b"abc")
    assert seal.mac(long) == seal.mac(long[:7], memoryview(long)[7:])


def test_a_message_over_the_limit_is_not_numbered() -> None:
    writer, reader = pair()
    with pytest.raises(MessageTooLong, match="1001 bytes is longer than the limit of 1000"):
        writer.frame(Kind.MESSAGE, [bytes(1001)])
    with pytest.raises(MessageTooLong, match="1001 bytes is longer than the limit of 1000"):
        writer.announcement(bytes(1001))
    assert reader.inline(padded(writer, b"next"))[0].seq == 0


def test_default_limit() -> None:
    assert frames.DEFAULT_MAX_BYTES == 1 << 30
