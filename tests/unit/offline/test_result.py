"""Results and errors on their way to the other ranks."""

import pytest

from spmd_serve.errors import UsageError
from spmd_serve.offline.result import CallResult, DriverError
from spmd_serve.wire import codec


class Strange(Exception):
    pass


class Wants(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def travelled(result: CallResult) -> CallResult:
    return CallResult.from_plain(codec.decode(codec.encode(result.to_plain())))


def test_values() -> None:
    assert travelled(CallResult([1, "a", None])).take() == [1, "a", None]
    assert travelled(CallResult(None)).take() is None


@pytest.mark.parametrize(
    "error", [ValueError("too long"), RuntimeError(""), UsageError("a line"), NotImplementedError("x")]
)
def test_errors_of_known_kinds_arrive_as_they_are(error: Exception) -> None:
    arrived = travelled(CallResult(error=error))
    with pytest.raises(type(error)) as raised:
        arrived.take()
    assert str(raised.value) == str(error)


@pytest.mark.parametrize("error", [Strange("odd"), Wants("a", "b"), UnicodeDecodeError("u", b"", 0, 1, "r")])
def test_errors_of_other_kinds_keep_their_name_and_text(error: Exception) -> None:
    with pytest.raises(DriverError, match=type(error).__name__) as raised:
        travelled(CallResult(error=error)).take()
    assert str(error) in str(raised.value)


@pytest.mark.parametrize(
    "plain",
    [["error", "builtins", "eval", "1"], ["error", "os", "system", "x"], ["error", "builtins", "int", "1"]],
)
def test_nothing_but_exceptions_is_made(plain: list[str]) -> None:
    assert type(CallResult.from_plain(plain).error) is DriverError
