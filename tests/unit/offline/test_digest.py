"""Two processes agree on what an argument is, whatever it is."""

import dataclasses
import enum
import functools
import time
from collections import UserList
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from spmd_serve.offline.digest import describe, digest


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


@dataclasses.dataclass
class Point:
    x: int
    y: object = None


class Params(msgspec.Struct):
    temperature: float = 1.0
    stop: list[str] = []


class Hostile:
    """Fails at every look."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(name)


def tensor(*shape: int, dtype: str = "float32") -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=dtype)


def add(one: int, other: int = 0) -> int:
    return one + other


SAME: dict[str, Callable[[], object]] = {
    "texts": lambda: ["Hello", "wörld", "\ud800"],
    "tokens": lambda: [[1, 2, 3], [4] * 1000],
    "a list and a tuple": lambda: ([1, "a"], (1, "a")),
    "dictionaries": lambda: {"a": 1, "b": [None, True, 1.5]},
    "sets": lambda: {"x", "y", "z"},
    "bytes": lambda: bytearray(b"abc"),
    "enums": lambda: Colour.GREEN,
    "data classes": lambda: Point(1, Point(2)),
    "structs": lambda: Params(0.5, ["x"]),
    "tensors": lambda: tensor(2, 3),
    "functions": lambda: add,
    "partial functions": lambda: functools.partial(add, 1, other=2),
    "objects": lambda: [object(), Hostile()],
    "classes": lambda: Point,
    "deep nesting": lambda: _nested(200),
}


def _nested(depth: int) -> object:
    value: object = "x"
    for _ in range(depth):
        value = [value]
    return value


DIFFERENT: dict[str, tuple[object, object]] = {
    "a letter": (["Hello", "a"], ["Hello", "b"]),
    "order": (["a", "b"], ["b", "a"]),
    "where a text ends": (["ab", "c"], ["a", "bc"]),
    "a token": ([1, 2, 3], [1, 2, 4]),
    "a token too many": ([1, 2, 3], [1, 2, 3, 3]),
    "what only acts as a list": (UserList("ab"), UserList("ac")),
    "a text of digits": (["1"], [1]),
    "a huge number": ([1, 2**70], [1, 2**71]),
    "None": ([None], ["None"]),
    "a key": ({"a": 1}, {"b": 1}),
    "a value": ({"a": 1}, {"a": 2}),
    "a member": ({1, 2}, {1, 3}),
    "an enum": (Colour.RED, Colour.GREEN),
    "a field": (Point(1), Point(2)),
    "a setting": (Params(0.5), Params(0.6)),
    "a shape": (tensor(2, 3), tensor(3, 2)),
    "a type": (tensor(2), tensor(2, dtype="int8")),
    "a function": (add, describe),
    "a bound argument": (functools.partial(add, 1), functools.partial(add, 2)),
    "a class of an object": (object(), Hostile()),
}


@pytest.mark.parametrize("kind", SAME)
def test_equal_things_have_equal_digests(kind: str) -> None:
    assert digest(SAME[kind]()) == digest(SAME[kind]())


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_things_have_different_digests(kind: str) -> None:
    one, other = DIFFERENT[kind]
    assert digest(one) != digest(other)


def test_the_order_of_keys_and_members_does_not_matter() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({f"{number}" for number in range(100)}) == digest(
        {f"{99 - number}" for number in range(100)}
    )


def test_a_million_tokens_take_no_time() -> None:
    prompts = [list(range(1000)) for _ in range(1000)]
    started = time.process_time()
    digest(prompts)
    assert time.process_time() - started < 2.0  # 0.03 s on a quiet machine


def test_descriptions_are_short() -> None:
    assert describe("x" * 100) == repr("x" * 39 + "…")
    assert describe(["a"] * 500) == "list of 500"
    assert describe({"a": 1}) == "dict of 1"
    assert describe(tensor(2, 3)) == "SimpleNamespace 2x3"
    assert describe(add) == "add"
    assert describe(Params()) == "Params"
    assert describe(None) == "None"
    assert describe(1.5) == "1.5"
