"""One line in, one line out: the OpenAI batch format, in the shape that vLLM's run-batch gives it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from pydantic_core import from_json, to_json


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. `number` is its line in the input, from 1."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class BadRequestLine:
    """A line that cannot be asked, and why. `custom_id` is None where the line has none that can be used."""

    number: int
    reason: str
    custom_id: str | None = None


class RequestOutcome(NamedTuple):
    """What the run counts of an answered line; tokens are 0 where the answer does not say."""

    failed: bool
    tokens_in: int
    tokens_out: int


def parse_line(number: int, raw: bytes) -> BatchLine | BadRequestLine:
    """Read a line of the OpenAI batch format. The body is left for its endpoint to check."""
    try:
        content = from_json(raw)
    except ValueError as problem:
        return BadRequestLine(number, f"not JSON: {problem}")
    if not isinstance(content, dict):
        return BadRequestLine(number, f"not a JSON object but {_kind(content)}")
    if "custom_id" not in content:
        return BadRequestLine(number, "custom_id is missing")
    custom_id = content["custom_id"]
    if not isinstance(custom_id, str):
        return BadRequestLine(number, f"custom_id must be a text, not {_kind(custom_id)}")
    for name in ("method", "url"):
        if not isinstance(content.get(name), str):
            what = "is missing" if name not in content else f"must be a text, not {_kind(content[name])}"
            return BadRequestLine(number, f"{name} {what}", custom_id)
    if not isinstance(content.get("body"), dict):
        what = (
            "is missing" if "body" not in content else f"must be a JSON object, not {_kind(content['body'])}"
        )
        return BadRequestLine(number, f"body {what}", custom_id)
    return BatchLine(number, custom_id, content["url"], content["body"], content["method"])


def error_output(custom_id: str, error: object, status_code: int = 400) -> dict[str, Any]:
    """The output object of a request that has no answer, as vLLM's run-batch writes it."""
    return {
        "id": f"vllm-{uuid4().hex}",
        "custom_id": custom_id,
        "response": {"status_code": status_code, "request_id": f"vllm-batch-{uuid4().hex}", "body": None},
        "error": error,
    }


def bad_line_output(line: BadRequestLine) -> dict[str, Any]:
    """The output object of a line that was not asked. One without a usable custom_id goes by ``line-N``."""
    return error_output(stand_in_id(line.number) if line.custom_id is None else line.custom_id, line.reason)


def crash_output(line: BatchLine, problem: Exception) -> dict[str, Any]:
    """The output object of a line whose handler raised."""
    message = f"{type(problem).__name__}: {problem}"
    info = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return error_output(line.custom_id, {"error": info}, 500)


def stand_in_id(number: int) -> str:
    """The id of a line that brings none."""
    return f"line-{number}"


def outcome_of(output: Mapping[str, Any]) -> RequestOutcome:
    """What an output object says of itself."""
    response = output.get("response") or {}
    failed = output.get("error") is not None or not response or response.get("status_code", 200) >= 400
    usage = (response.get("body") or {}).get("usage") or {}
    return RequestOutcome(failed, usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)


def error_text(output: Mapping[str, Any]) -> str | None:
    """The error of an output object in words; None where there is none."""
    error = output.get("error")
    if error is None:
        return None
    if isinstance(error, dict):
        inner = error.get("error", error)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return str(error)


def with_line_number(output: dict[str, Any], number: int) -> dict[str, Any]:
    """The output object with ``line N:`` before its error's text; without an error, unchanged."""
    error = output.get("error")
    prefix = f"line {number}: "
    if isinstance(error, str):
        return {**output, "error": prefix + error}
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        inner = error["error"]
        return {
            **output,
            "error": {**error, "error": {**inner, "message": prefix + str(inner.get("message"))}},
        }
    return output


def encode(output: Mapping[str, Any]) -> bytes:
    """One line of the output file, with its newline."""
    return to_json(output, inf_nan_mode="null") + b"\n"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
