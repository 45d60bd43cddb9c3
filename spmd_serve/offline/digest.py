"""Compare arguments between ranks by a hash that is the same in every process and never fails.

Text, numbers and containers are hashed completely. Of tensors and arrays only the type and the shape are
hashed, because the values may be on a device, or differ between ranks on purpose. Of other objects only the
name of the class is hashed. No memory address, time, or order of a set enters the hash.
"""

import array
import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

_SIZE = 16
_MAX_DEPTH = 30
_SHOWN_CHARACTERS = 40

Feed = Callable[[bytes], None]


def digest(value: object) -> str:
    """Return the hash of a value, 32 hexadecimal digits. Long texts and lists of tokens are fast."""
    running = hashlib.blake2b(digest_size=_SIZE)
    _feed(running.update, value, 0)
    return running.hexdigest()


def describe(value: object) -> str:
    """Return a short description of a value for an error message."""
    if value is None or isinstance(value, bool | int | float | enum.Enum):
        return str(value)
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN_CHARACTERS else value[: _SHOWN_CHARACTERS - 1] + "…")
    if isinstance(value, bytes | Mapping | Sequence | Set):
        return f"{type(value).__name__} of {len(value)}"
    if _is_tensor(value):
        return f"{type(value).__name__} {_shape(value)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return type(value).__name__


def _feed(feed: Feed, value: object, depth: int) -> None:
    try:
        _feed_known(feed, value, depth)
    except Exception:  # an attribute of an unknown object may raise anything: hash its class only
        _tag(feed, "odd", _name(type(value)))


def _feed_known(feed: Feed, value: Any, depth: int) -> None:
    kind = type(value)
    if kind is str:
        _tag(feed, "text", value)
    elif value is None or kind in (bool, int, float):
        _tag(feed, "number", repr(value))
    elif depth > _MAX_DEPTH:
        _tag(feed, "deep", _name(kind))
    elif isinstance(value, enum.Enum):
        _tag(feed, "enum", f"{_name(kind)} {value.name}")
    elif isinstance(value, bytes | bytearray | memoryview):
        _tag(feed, "bytes", str(len(value)))
        feed(bytes(value))
    elif _is_tensor(value):
        _tag(feed, "tensor", f"{_name(kind)} {value.dtype} {_shape(value)}")
    elif isinstance(value, Sequence) and not isinstance(value, str):  # including a column of a data set
        _feed_sequence(feed, value, depth)
    elif isinstance(value, Mapping):
        _feed_unordered(feed, "mapping", value.items(), depth)
    elif isinstance(value, Set):
        _feed_unordered(feed, "set", value, depth)
    elif isinstance(value, functools.partial):
        _feed_fields(feed, "partial", {"": value.func, "args": value.args, **value.keywords}, depth)
    elif (fields := _fields(value)) is not None:
        _feed_fields(feed, _name(kind), fields, depth)
    elif hasattr(value, "__qualname__"):
        _tag(feed, "named", _name(value))
    else:
        _tag(feed, "object", _name(kind))


def _feed_sequence(feed: Feed, value: Sequence[object], depth: int) -> None:
    _tag(feed, "sequence", str(len(value)))
    if len(value) and type(value[0]) is int:
        try:
            tokens = array.array("q", cast(Sequence[int], value)).tobytes()
        except (TypeError, OverflowError):
            pass
        else:
            return feed(b"tokens " + tokens)
    for item in value:
        _feed(feed, item, depth + 1)


def _feed_unordered(feed: Feed, what: str, items: Any, depth: int) -> None:
    hashes = []
    for item in items:
        running = hashlib.blake2b(digest_size=_SIZE)
        _feed(running.update, item, depth + 1)
        hashes.append(running.digest())
    _tag(feed, what, str(len(hashes)))
    for one in sorted(hashes):
        feed(one)


def _feed_fields(feed: Feed, name: str, fields: Mapping[str, object], depth: int) -> None:
    _tag(feed, "fields", f"{name} {len(fields)}")
    for field, item in fields.items():
        _tag(feed, "field", field)
        _feed(feed, item, depth + 1)


def _fields(value: Any) -> dict[str, object] | None:
    """Return the fields of a dataclass, a msgspec struct or a pydantic model; None for other objects."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        names: Sequence[str] = [field.name for field in dataclasses.fields(kind)]
    elif isinstance(getattr(kind, "__struct_fields__", None), tuple):
        names = kind.__struct_fields__
    elif isinstance(getattr(kind, "model_fields", None), dict):
        names = list(kind.model_fields)
    else:
        return None
    return {name: getattr(value, name, None) for name in names}


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape)) or "scalar"


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _tag(feed: Feed, what: str, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    feed(f"{what} {len(data)} ".encode())
    feed(data)
