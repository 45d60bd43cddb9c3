"""Compact sets of finished line numbers and of used ids, for millions of lines."""

from array import array
from hashlib import blake2b

_SHARDS = 256
_INITIAL_ENTRIES = 64


def digest_of(data: bytes) -> int:
    """Return a 64-bit hash: among a million different lines two are alike with a probability of 3e-8."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class LineSet:
    """A set of line numbers, one bit each (125 kB for a million lines)."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Add a number; return whether it was new."""
        byte, bit = number >> 3, 1 << (number & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits), 64)))
        if self._bits[byte] & bit:
            return False
        self._bits[byte] |= bit
        self._count += 1
        return True

    def remove(self, number: int) -> None:
        """Remove a number that is in the set."""
        self._bits[number >> 3] &= ~(1 << (number & 7))
        self._count -= 1

    def highest(self) -> int:
        """Return the highest number in the set, or 0 if it is empty."""
        byte = len(self._bits.rstrip(b"\0")) - 1
        return byte * 8 + self._bits[byte].bit_length() - 1 if byte >= 0 else 0


class IdTable:
    """Which line first used an id. Holds 8-byte digests, not ids: 18 to 36 MB for a million ids."""

    def __init__(self) -> None:
        # Many small tables: growing one of them does not hold up an event loop.
        self._shards = [_Shard() for _ in range(_SHARDS)]

    def first_use(self, name: str, number: int) -> int | None:
        """Return the line that used `name` first; if there is none, record `number` and return None."""
        digest = digest_of(name.encode("utf-8", "surrogatepass")) or 1
        return self._shards[digest % _SHARDS].put(digest, number)


class _Shard:
    """Open addressing in two flat arrays; digest 0 marks an empty entry."""

    def __init__(self) -> None:
        self._digests = array("Q", bytes(8 * _INITIAL_ENTRIES))
        self._numbers = array("L", bytes(array("L").itemsize * _INITIAL_ENTRIES))
        self._used = 0

    def put(self, digest: int, number: int) -> int | None:
        entry = self._entry(digest)
        if self._digests[entry]:
            return self._numbers[entry]
        self._digests[entry] = digest
        self._numbers[entry] = number
        self._used += 1
        if self._used * 3 > len(self._digests) * 2:
            self._grow()
        return None

    def _entry(self, digest: int) -> int:
        digests = self._digests
        last = len(digests) - 1
        entry = (digest >> 8) & last
        while digests[entry] and digests[entry] != digest:
            entry = (entry + 1) & last
        return entry

    def _grow(self) -> None:
        old = [
            (digest, number) for digest, number in zip(self._digests, self._numbers, strict=True) if digest
        ]
        size = 2 * len(self._digests)
        self._digests = array("Q", bytes(8 * size))
        self._numbers = array("L", bytes(self._numbers.itemsize * size))
        for digest, number in old:
            entry = self._entry(digest)
            self._digests[entry] = digest
            self._numbers[entry] = number
