"""The codec: data comes back as it went, and nothing that arrives can name, build or call anything else."""

import collections
import dataclasses
import enum
import functools
import io
import operator
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from spmd_serve.errors import SpmdError, UsageError
from spmd_serve.wire import allowed_classes, codec
from spmd_serve.wire.codec import RefusedClass, decode, encode
from spmd_serve.wire.frames import BadFrame


@dataclasses.dataclass
class Plain:
    name: str
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: int


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(enum.Enum):
    RED = "red"


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class Items(collections.UserDict[str, int]):
    pass


class Caller:
    """What must never be on the list: called, it does something."""

    def __call__(self, *args: object) -> None:
        raise AssertionError("called")


MINE = (Plain, Frozen, Pair, Colour, Slotted, Items)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_classes, "_constructed", dict(allowed_classes._constructed))
    monkeypatch.setattr(codec, "_reducers", {})
    for cls in MINE:
        codec.allow_class(f"{cls.__module__}:{cls.__qualname__}")


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    return bool(left == right) and type(left) is type(right)


BUILTIN: list[Any] = [
    None, True, 7, -(1 << 80), 1.5, "text", b"bytes", bytearray(b"array"), [1, [2]], (1, ("a",)),
    {"a": {1: 2}}, {1, 2}, frozenset({3}), 2 + 3j, slice(1, None, 2), range(3), collections.OrderedDict(a=1),
    collections.deque([1, 2], maxlen=5), collections.defaultdict(list, {"a": [1]}),
    collections.Counter("aab"), Fraction(1, 3), ("execute_model", (), {"kw": [None]}, 0),
]  # fmt: skip


@pytest.mark.parametrize("value", BUILTIN, ids=lambda value: type(value).__name__)
def test_builtin_data_round_trip(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


DTYPES = ("bfloat16", "float32", "int64", "bool", "uint8", "float8_e4m3fn", "complex64")


@pytest.mark.parametrize("size", [0, 1, 3, 100_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_round_trip(dtype: str, size: int) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    tensor = torch.arange(size).to(torch.float32).to(kind)
    back: Any = decode(encode({"t": tensor}))
    assert back["t"].dtype == kind
    assert torch.equal(back["t"].view(torch.uint8), tensor.view(torch.uint8))
    if size:
        back["t"].view(torch.uint8)[0] = 1  # belongs to the receiver, who may write


def test_tensor_shapes_and_kinds() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    cases = [
        base,
        base.transpose(0, 2),
        base[:, 1],
        torch.tensor(3.5),
        torch.empty(0, 7),
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ]
    for tensor in cases:
        back: Any = decode(encode(tensor))
        assert same(tensor.detach(), back)
    assert decode(encode((torch.float16, torch.Size([2, 3]), torch.device("cpu")))) == (
        torch.float16,
        torch.Size([2, 3]),
        torch.device("cpu"),
    )


@pytest.mark.parametrize("size", [0, 5, 50_000])
def test_numpy_round_trip(size: int) -> None:
    for dtype in ("i4", "f8", "?", "u1", "f2", "c16", "M8[s]", "U7", "S3"):
        array = np.arange(size).astype(dtype) if dtype != "?" else np.arange(size) % 2 == 0
        assert same(array, decode(encode(array))), dtype
    assert same(np.asfortranarray(np.ones((2, 3))), decode(encode(np.asfortranarray(np.ones((2, 3))))))
    assert same(np.array(4), decode(encode(np.array(4))))
    for scalar in (np.int64(3), np.float32(2.5), np.bool_(True), np.str_("ab")):
        assert decode(encode(scalar)) == scalar
        assert type(decode(encode(scalar))) is type(scalar)
    objects = np.array([[1, "a"], [None, (2,)]], dtype=object)
    assert same(objects, decode(encode(objects)))


def test_received_arrays_may_be_written() -> None:
    for size in (3, 50_000):
        for payload in (encode(np.zeros(size)), bytearray(encode(np.zeros(size)))):
            array: Any = decode(payload)
            array[0] = 1.0


def test_big_arrays_are_neither_copied_when_encoding_nor_when_decoding() -> None:
    array, tensor = np.zeros(100_000, dtype=np.uint8), torch.zeros(100_000, dtype=torch.uint8)
    parts = codec.encode_parts([array, tensor])
    assert sum(len(part) for part in parts if not isinstance(part, memoryview)) < 1000
    payload = bytearray(b"".join(parts))
    back: Any = decode(payload)
    payload[-1] = payload[-1 - 100_000 - 96] = 0
    before = [int(back[0].sum()), int(back[1].sum())]
    memoryview(payload)[-100_000:] = bytes([1]) * 100_000
    assert before == [0, 0]
    assert int(back[1].sum()) == 100_000
    assert back[1].data_ptr() % 16 == back[0].ctypes.data % 16


def test_shared_and_circular_objects(allowed: None) -> None:
    shared = Plain("one")
    back: Any = decode(encode([shared, shared]))
    assert back[0] is back[1]
    loop = Plain("loop")
    loop.more = [loop]
    again: Any = decode(encode(loop))
    assert again.more[0] is again


def test_classes_on_the_list_round_trip(allowed: None) -> None:
    for value in (Plain("a", {"b": [1]}), Frozen(3), Pair(1, "x"), Colour.RED, Items({"a": 1})):
        assert same(value, decode(encode(value)))
    assert decode(encode(Colour.RED)) is Colour.RED
    slotted: Any = decode(encode(Slotted(4)))
    assert slotted.value == 4


def test_the_sender_refuses_what_may_not_cross(allowed: None) -> None:
    class Local:
        pass

    for value, name in [
        (Caller(), "Caller"),
        (Local(), "Local"),
        (os.system, "posix:system"),
        (print, "builtins:print"),
        (lambda: 1, "<lambda>"),
        (functools.partial(print), "functools:partial"),
        (Plain, "Plain"),
        (ValueError("x"), "builtins:ValueError"),
        (np.array([Caller()], dtype=object), "Caller"),
        (operator.itemgetter(1), "operator:itemgetter"),
        (np.zeros(2, dtype=[("a", "i4")]), "dtype"),
        (torch.eye(3).to_sparse(), "layout"),
        (sys, "module"),
        ({"deep": [(Plain("a", more={1: Caller()}),)]}, "Caller"),
    ]:
        with pytest.raises(RefusedClass, match=name) as caught:
            encode(value)
        assert "\n" not in str(caught.value)
    with pytest.raises(RefusedClass, match=r"--control-allow-class tests.process.wire.test_codec:Caller"):
        encode(Caller())


def test_allow_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_classes, "_constructed", dict(allowed_classes._constructed))
    monkeypatch.setattr(codec, "_reducers", {})
    name = f"{Plain.__module__}:Plain"
    with pytest.raises(RefusedClass, match=name):
        encode(Plain("a"))
    codec.allow_class(name)
    assert decode(encode(Plain("a"))) == Plain("a")
    for wrong in (
        "Plain",
        "tests.process.wire.test_codec",
        "tests.process.wire.test_codec:Plain()",
        ":x",
        "a:",
        "os:system; rm",
    ):
        with pytest.raises(UsageError, match=r"package\.module:Class"):
            codec.allow_class(wrong)


def test_an_allowed_name_that_is_no_class_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_classes, "_constructed", dict(allowed_classes._constructed))
    for name in (
        "os:system",
        "no_such_module:Class",
        "os:Nothing",
        "tests.process.wire.test_codec:Plain.name",
    ):
        codec.allow_class(name)
        with pytest.raises(RefusedClass, match=r"no class|not installed here"):
            decode(stream(codec._new, name))


# --- hostile payloads -----------------------------------------------------------------------------------


class Reduce:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.answer = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.answer


def payload(pickled: bytes) -> bytes:
    return struct.pack("<I", 0) + pickled


def stream(function: Callable[..., object], *args: object) -> bytes:
    return payload(pickle.dumps(Reduce(function, *args), 5))


def stack_global(module: str, name: str, call: bytes = b")R") -> bytes:
    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return payload(b"\x80\x05" + text(module) + text(name) + b"\x93" + call + b".")


ALLOWED_CLASS = "vllm.sampling_params:SamplingParams"

HOSTILE: dict[str, bytes] = {
    "os.system": stream(os.system, "touch /tmp/spmd_serve_was_here"),
    "subprocess": stream(subprocess.Popen, ["true"]),
    "eval": stream(eval, "1+1"),
    "exec": stream(exec, "1+1"),
    "import": stream(__import__, "os"),
    "getattr": stream(getattr, "a", "upper"),
    "partial": stream(functools.partial, os.system, "true"),
    "attrgetter": stream(operator.attrgetter, "a"),
    "methodcaller": stream(operator.methodcaller, "upper"),
    "torch.load": stream(torch.load, io.BytesIO(b"x")),
    "pickle.loads": stream(pickle.loads, b"N."),
    "type": stream(type, "a", (), {}),
    "open": stream(open, "/tmp/x"),
    "map": stream(map, len, []),
    "numpy's own pickling": payload(pickle.dumps(np.array([Reduce(os.system, "true")], dtype=object), 2)),
    "numpy load": stream(np.load, "/tmp/x"),
    "in a list in an allowed call": stream(codec._object_array, (1,), [Reduce(os.system, "true")]),
    "a listed class by reference": stack_global("vllm.sampling_params", "SamplingParams"),
    "attribute of a listed class": stack_global("vllm.sampling_params", "SamplingParams.__init__"),
    "dotted builtin": stack_global("builtins", "set.__class__"),
    "dotted name of ours": stack_global("spmd_serve.wire.codec", "_new.__globals__"),
    "other name of ours": stack_global("spmd_serve.wire.codec", "importlib"),
    "the decoder itself": stack_global("spmd_serve.wire.codec", "decode"),
    "old GLOBAL opcode": payload(b"cos\nsystem\n(S'true'\ntR."),
    "INST opcode": payload(b"(S'true'\nios\nsystem\n."),
    "OBJ opcode": payload(b"(cos\nsystem\nS'true'\no."),
    "extension registry": payload(b"\x80\x02\x82\x01."),
    "persistent id": payload(b"Pos\n."),
    "_new of a class that is not listed": stream(codec._new, "subprocess:Popen"),
    "_new of a function": stream(codec._new, "os:system"),
    "_new with a dotted name": stream(codec._new, f"{ALLOWED_CLASS}.__init__.__globals__"),
    "_new with a class": stream(codec._new, set),
    "_new of no name": stream(codec._new, ["a"]),
    "_construct where only _new may": stream(codec._construct, "vllm.v1.core.sched.output:SchedulerOutput"),
    "object dtype over raw bytes": stream(codec._array, "O", (1,), b"\x00" * 8),
    "object dtype in a structure": stream(codec._array, "i4,O", (1,), b"\x00" * 12),
    "object scalar": stream(codec._scalar, "O", b"\x00" * 8),
    "array longer than its bytes": stream(codec._array, "i4", (1 << 40,), b"\x00" * 8),
    "tensor longer than its bytes": stream(codec._tensor, "int8", (1 << 40,), b"\x00" * 8),
    "tensor without bytes": stream(codec._tensor, "int8", (1 << 40,), b""),
    "dtype that is a function": stream(codec._dtype, "load"),
    "call of an instance": stream(Reduce, "x"),
    "nothing": b"",
    "three bytes": b"abc",
    "no pickle": payload(b"hello"),
    "cut short": encode({"a": 1})[:-1],
    "buffers that are not there": struct.pack("<IQQ", 1, 4, 1 << 40) + b"N...",
    "a count beyond all bounds": struct.pack("<I", 0xFFFFFFFF) + b"N.",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_payloads_are_refused(name: str) -> None:
    with pytest.raises(SpmdError) as caught:
        decode(HOSTILE[name])
    assert isinstance(caught.value, RefusedClass | BadFrame)
    assert "\n" not in str(caught.value)
    assert not os.path.exists("/tmp/spmd_serve_was_here")


def test_a_refusal_names_the_class_and_the_flag() -> None:
    with pytest.raises(RefusedClass, match=r"posix:system .*--control-allow-class posix:system"):
        decode(HOSTILE["os.system"])


def test_nothing_reachable_by_the_pickle_machine_can_be_changed() -> None:
    """BUILD with a slot state is setattr: on our globals it must fail, or do no harm."""
    for thing in codec._TYPES:
        with pytest.raises(TypeError):
            setattr(thing, "x", 1)  # noqa: B010
    for function in codec._FUNCTIONS:
        with pytest.raises((TypeError, AttributeError)):
            function.__globals__ = {}
        with pytest.raises(TypeError):
            function.__code__ = (1,)
        assert function.__defaults__ is None, "a hostile __defaults__ must find no parameter to fill"


def test_listed_names_are_well_formed_and_unique() -> None:
    names = [*allowed_classes.INSTANCES, *allowed_classes.CONSTRUCTED]
    assert len(names) == len(set(names))
    for name in names:
        module, _, qualname = name.partition(":")
        assert all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))), name


def test_importing_the_codec_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from spmd_serve.wire import codec; codec.decode(codec.encode([{1: 'a'}]));"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
