"""Objects <-> bytes for the control channel: pickle, restricted to data.

The encoder writes plain pickle protocol 5, but never a class, function or method by reference: an instance
becomes a call of `_new` or `_construct` below with the class's *name*. So the decoder's find_class knows a
dozen harmless globals and nothing else, and the pickle machine never holds a class that it could change or
a function that it could call; `_new` and `_construct` rebuild only what wire/allowed_classes.py (or the
operator's --control-allow-class) names. Both ends check, so the sender gets the error before
anything is sent.

Payload: u32 number of buffers, and with buffers: u64 length of the pickle, u64 length of each buffer, the
pickle, each buffer from a multiple of 64 bytes on. Arrays and tensors of OUT_OF_BAND bytes and more are not
copied into the pickle, and decode returns them as views of the payload.
torch and numpy are imported only when something of theirs passes through.
"""

import collections
import copyreg
import enum
import io
import math
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

from spmd_serve.errors import SpmdError
from spmd_serve.wire.allowed_classes import RefusedClass, allow_class, find_class, is_constructed, refuse
from spmd_serve.wire.frames import BadFrame, Buffer

__all__ = ["OUT_OF_BAND", "RefusedClass", "allow_class", "decode", "encode", "encode_parts"]

OUT_OF_BAND = 1 << 14
_ALIGN = 64
_NO_BUFFERS = struct.pack("<I", 0)


# --- what the decoder may call -------------------------------------------------------------------------


def _new(name: str, *args: object) -> object:
    cls = find_class(name)
    return cls.__new__(cls, *args)


def _construct(name: str, *args: object) -> object:
    if not is_constructed(name):
        raise refuse(str(name)[:200])
    return find_class(name)(*args)


def _array(dtype: str, shape: tuple[int, ...], data: Buffer) -> object:
    import numpy as np

    kind = np.dtype(str(dtype))
    if kind.hasobject:  # its bytes would be taken for pointers
        raise refuse("numpy:dtype('O')")
    return np.ndarray(shape, kind, data)


def _object_array(shape: tuple[int, ...], items: list[object]) -> object:
    import numpy as np

    array = np.empty(len(items), dtype=object)
    for place, item in enumerate(items):
        array[place] = item
    return array.reshape(shape)


def _scalar(dtype: str, data: Buffer) -> object:
    array: Any = _array(dtype, (1,), data)
    return array[0]


def _tensor(dtype: str, shape: tuple[int, ...], data: Buffer) -> object:
    import torch

    kind = _dtype(dtype)
    if not len(data):
        if math.prod(shape):
            raise ValueError("a tensor without data")
        return torch.empty(shape, dtype=kind)
    writable = bytearray(data) if memoryview(data).readonly else data
    return torch.frombuffer(writable, dtype=torch.uint8).view(kind).view(shape)


def _dtype(name: str) -> Any:
    import torch

    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise refuse(f"torch:{name}")
    return found


def _size(*sizes: int) -> object:
    import torch

    return torch.Size(sizes)


def _device(name: str) -> object:
    import torch

    return torch.device(str(name))


_FUNCTIONS: tuple[Any, ...] = (
    _new, _construct, _array, _object_array, _scalar, _tensor, _dtype, _size, _device,
)  # fmt: skip
_TYPES = (
    set, frozenset, bytearray, complex, slice, range, list, dict, int, float,
    collections.OrderedDict, collections.deque, collections.defaultdict,
)  # fmt: skip
# All of these types are immutable and static, so that a hostile BUILD can't set attributes on them.
_GLOBALS: dict[tuple[str, str], object] = {
    (thing.__module__, thing.__qualname__): thing for thing in (*_FUNCTIONS, *_TYPES)
}


class _Decoder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise refuse(f"{module}:{name}") from None


def decode(payload: Buffer) -> object:
    """The object in `payload`; its arrays and tensors may be views of it, so leave a bytearray alone then.

    Raises RefusedClass for what is not allowed to cross, BadFrame for bytes that are no message of ours.
    """
    try:
        (count,) = struct.unpack_from("<I", payload)
        if not count:
            stream = io.BytesIO(payload)
            stream.seek(4)
            return _Decoder(stream).load()
        view = memoryview(bytearray(payload) if memoryview(payload).readonly else payload)
        length, *lengths = struct.unpack_from(f"<{count + 1}Q", view, 4)
        at = 4 + 8 * (count + 1)
        stream = io.BytesIO(view[at : at + length])
        at += length
        buffers = []
        for size in lengths:
            at += -at % _ALIGN
            buffers.append(view[at : at + size])
            at += size
        if at != len(view):
            raise ValueError("lengths do not add up")
        return _Decoder(stream, buffers=buffers).load()
    except SpmdError:
        raise
    except Exception as error:
        what = str(error).partition("\n")[0]
        raise BadFrame(f"a control message does not decode: {type(error).__name__}: {what}") from error


# --- encoding ------------------------------------------------------------------------------------------

_Reduced = Any  # a reduce tuple, or NotImplemented for "the pickler knows how"
_reducers: dict[type, Callable[[Any], _Reduced]] = {}


class _Encoder(pickle.Pickler):
    def reducer_override(self, obj: Any) -> _Reduced:
        kind = type(obj)
        reducer = _reducers.get(kind)
        if reducer is None:
            reducer = _reducers[kind] = _reducer(kind)
        return reducer(obj)


def encode(obj: object) -> bytes:
    """`obj` as one payload. Raises RefusedClass for what may not cross."""
    return b"".join(encode_parts(obj))


def encode_parts(obj: object) -> list[Buffer]:
    """The payload of `encode` in pieces, with the memory of big arrays and tensors not copied yet."""
    big: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if len(raw) < OUT_OF_BAND:
            return True
        big.append(raw)
        return False

    stream = io.BytesIO()
    _Encoder(stream, 5, buffer_callback=keep_in_band).dump(obj)
    pickled = stream.getvalue()
    if not big:
        return [_NO_BUFFERS, pickled]
    head = struct.pack(f"<I{len(big) + 1}Q", len(big), len(pickled), *map(len, big))
    parts: list[Buffer] = [head, pickled]
    at = len(head) + len(pickled)
    for raw in big:
        pad = -at % _ALIGN
        parts += [bytes(pad), raw]
        at += pad + len(raw)
    return parts


def _reducer(kind: type) -> Callable[[Any], _Reduced]:
    """How instances of `kind` are written; looked up once a type."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    constructed = is_constructed(name)
    if constructed is not None:
        if issubclass(kind, enum.Enum):
            return lambda obj: (_construct, (name, obj._value_))
        plain = (
            not constructed
            and kind.__reduce_ex__ is object.__reduce_ex__
            and kind.__reduce__ is object.__reduce__
            and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
            and not issubclass(kind, tuple | list | dict | set | frozenset | str | bytes | int | float)
            and not any(
                "__slots__" in vars(base) or "__getnewargs__" in vars(base) for base in kind.__mro__[:-1]
            )
        )
        if plain:
            return lambda obj: (_new, (name,), vars(obj))
        return lambda obj: _by_reduce(name, kind, obj)
    bases = {f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__}
    for base, reducer in _FOREIGN.items():
        if base in bases:
            return reducer
    if kind in _TYPES or kind is pickle.PickleBuffer:
        return lambda obj: NotImplemented
    return _by_name_if_ours


def _by_name_if_ours(obj: Any) -> _Reduced:
    """For classes, functions and whatever else has no reducer: pass our own globals, refuse the rest."""
    named = obj if hasattr(obj, "__qualname__") else type(obj)
    module, name = getattr(named, "__module__", "?"), named.__qualname__
    if _GLOBALS.get((module, name)) is obj:
        return NotImplemented
    if named is not obj and is_constructed(f"{module}:{name}") is not None:  # allowed since it was refused
        _reducers[named] = _reducer(named)
        return _reducers[named](obj)
    raise refuse(f"{module}:{name}")


def _by_reduce(name: str, kind: type, obj: Any) -> _Reduced:
    """What the object's own __reduce_ex__ says, with the class replaced by its name."""
    function, args, *rest = obj.__reduce_ex__(4)
    if function is copyreg.__newobj__ and args[0] is kind:  # type: ignore[attr-defined]
        return (_new, (name, *args[1:]), *rest)
    if function is kind and is_constructed(name):
        return (_construct, (name, *args), *rest)
    raise RefusedClass(f"{name} may not cross the control channel: it is pickled through {function!r}")


def _reduce_array(obj: Any) -> _Reduced:
    if obj.dtype.hasobject and obj.dtype.names is None:
        return _object_array, (obj.shape, obj.ravel().tolist())
    return _array, (_plain_dtype(obj), obj.shape, _raw(obj))


def _raw(array: Any) -> pickle.PickleBuffer:
    np = sys.modules["numpy"]
    return pickle.PickleBuffer(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _plain_dtype(obj: Any) -> str:
    if obj.dtype.kind == "V":
        raise RefusedClass(f"a numpy array of dtype {obj.dtype} may not cross the control channel")
    return str(obj.dtype.str)


def _reduce_tensor(obj: Any) -> _Reduced:
    torch = sys.modules["torch"]
    if obj.layout is not torch.strided or obj.is_quantized:
        raise RefusedClass(
            f"a tensor of layout {obj.layout} and type {obj.dtype} may not cross the control channel"
        )
    flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
    return _tensor, (str(obj.dtype)[len("torch.") :], tuple(obj.shape), raw)


_FOREIGN: dict[str, Callable[[Any], _Reduced]] = {
    "numpy:ndarray": _reduce_array,
    "numpy:generic": lambda obj: (_scalar, (_plain_dtype(obj), obj.tobytes())),
    "torch:Tensor": _reduce_tensor,
    "torch:dtype": lambda obj: (_dtype, (str(obj)[len("torch.") :],)),
    "torch:Size": lambda obj: (_size, tuple(obj)),
    "torch:device": lambda obj: (_device, (str(obj),)),
}
