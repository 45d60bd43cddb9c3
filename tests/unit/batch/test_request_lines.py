"""Lines of the OpenAI batch format and plain prompts: parsed, refused, encoded."""

import json
from typing import Any

import pytest

from spmd_serve.batch.options import PLAIN_MAX_TOKENS, BatchOptions
from spmd_serve.batch.prompts import parse_prompt, plain_output
from spmd_serve.batch.request_lines import (
    BadRequestLine,
    BatchLine,
    RequestOutcome,
    bad_line_output,
    crash_output,
    encode,
    error_output,
    error_text,
    outcome_of,
    parse_line,
    with_line_number,
)

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {"k": 1}}


def test_parse_good() -> None:
    assert parse_line(3, json.dumps(GOOD).encode()) == BatchLine(3, "a", "/v1/x", {"k": 1}, "POST")


@pytest.mark.parametrize(
    ("raw", "reason", "custom_id"),
    [
        (b'{"custom_id": ', "not JSON: EOF", None),
        (b'{"a": "\xff"}', "not JSON: ", None),
        (b"[1]", "not a JSON object but a list", None),
        (b"null", "not a JSON object but null", None),
        (json.dumps({**GOOD, "custom_id": 5}).encode(), "custom_id must be a text, not a number", None),
        (b'{"method": "POST"}', "custom_id is missing", None),
        (b'{"custom_id": "a"}', "method is missing", "a"),
        (json.dumps({**GOOD, "url": None}).encode(), "url must be a text, not null", "a"),
        (json.dumps({**GOOD, "body": "x"}).encode(), "body must be a JSON object, not a text", "a"),
    ],
)
def test_parse_bad(raw: bytes, reason: str, custom_id: str | None) -> None:
    line = parse_line(7, raw)
    assert isinstance(line, BadRequestLine)
    assert line.reason.startswith(reason)
    assert (line.number, line.custom_id) == (7, custom_id)


def test_error_lines_have_run_batchs_shape() -> None:
    output = with_line_number(bad_line_output(BadRequestLine(7, "not JSON")), 7)
    assert output["custom_id"] == "line-7"
    assert output["error"] == "line 7: not JSON"
    assert set(output) == {"id", "custom_id", "response", "error"}
    response = output["response"]
    assert (response["status_code"], response["body"]) == (400, None)
    assert response["request_id"].startswith("vllm-batch-")
    assert outcome_of(output) == RequestOutcome(True, 0, 0)
    named = bad_line_output(BadRequestLine(7, "x", "mine"))
    assert named["custom_id"] == "mine"


def test_line_number_goes_into_a_structured_error_too() -> None:
    error = {"error": {"message": "too long", "code": 400}}
    output = with_line_number(error_output("a", error), 9)
    assert output["error"] == {"error": {"message": "line 9: too long", "code": 400}}
    assert error_text(output) == "line 9: too long"
    crash = crash_output(BatchLine(1, "a", "/", {}), RuntimeError("boom"))
    assert (error_text(crash), crash["response"]["status_code"]) == ("RuntimeError: boom", 500)


def test_outcome_counts_tokens() -> None:
    body = {"usage": {"prompt_tokens": 4, "completion_tokens": 6}}
    good = {"response": {"status_code": 200, "body": body}, "error": None}
    assert outcome_of(good) == RequestOutcome(False, 4, 6)
    assert outcome_of({"response": {"status_code": 200, "body": {}}, "error": None}) == RequestOutcome(
        False, 0, 0
    )
    assert outcome_of({"response": None, "error": None}).failed


def test_encode_is_one_line() -> None:
    assert encode({"a": "x\ny\u2028ä", "b": 1e-5}).count(b"\n") == 1
    assert json.loads(encode({"a": "x\ny\u2028ä"})) == {"a": "x\ny\u2028ä"}


def plain(**more: Any) -> BatchOptions:
    return BatchOptions(prompts="p.txt", output_file="o", **more)


def test_plain_text_becomes_a_completion() -> None:
    line, fields = parse_prompt(3, b"  Hello \r", plain())
    assert line == BatchLine(
        3, "line-3", "/v1/completions", {"prompt": "  Hello ", "max_tokens": PLAIN_MAX_TOKENS}
    )
    assert fields == {"prompt": "  Hello "}


def test_plain_chat_with_sampling() -> None:
    options = plain(chat=True, system="Be brief.", sampling_seed=7, stop=("x",), n=2, max_tokens=5)
    line, _ = parse_prompt(1, b"Hi", options)
    assert isinstance(line, BatchLine)
    assert line.url == "/v1/chat/completions"
    assert line.body == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "n": 2,
        "seed": 7,
        "stop": ["x"],
    }


def test_plain_jsonl_keeps_other_fields() -> None:
    options = BatchOptions(prompts="p.jsonl", output_file="o")
    line, fields = parse_prompt(2, b'{"prompt": "Hi", "key": [1], "text": "ours"}', options)
    assert isinstance(line, BatchLine) and line.body["prompt"] == "Hi"
    assert fields == {"prompt": "Hi", "key": [1]}
    for raw in (b"{", b"[]", b'{"prompt": 5}', b"{}"):
        assert isinstance(parse_prompt(2, raw, options)[0], BadRequestLine)


def test_plain_refuses_what_is_not_utf8() -> None:
    line, _ = parse_prompt(4, b"\xff", plain())
    assert isinstance(line, BadRequestLine) and "not UTF-8" in line.reason


def choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": "stop"}


def test_plain_output() -> None:
    body = {"choices": [choice(0, "yes")], "usage": {"prompt_tokens": 1}}
    output = {"response": {"status_code": 200, "body": body}, "error": None}
    assert plain_output(5, {"prompt": "p", "key": 1}, output, plain()) == {
        "line": 5,
        "prompt": "p",
        "text": "yes",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 1},
        "error": None,
        "key": 1,
    }


def test_plain_output_of_several_answers_and_of_none() -> None:
    body = {"choices": [choice(1, "b"), choice(0, "a")]}
    several = plain_output(1, {"prompt": "p"}, {"response": {"body": body}, "error": None}, plain(n=2))
    assert (several["text"], several["finish_reason"]) == (["a", "b"], ["stop", "stop"])
    failed = plain_output(1, {"prompt": "p"}, error_output("line-1", "no"), plain())
    assert (failed["text"], failed["error"]) == (None, "no")


def test_plain_output_of_chat() -> None:
    body = {"choices": [{"index": 0, "message": {"content": "hey"}, "finish_reason": "length"}]}
    output = plain_output(1, {"prompt": "p"}, {"response": {"body": body}, "error": None}, plain(chat=True))
    assert (output["text"], output["finish_reason"]) == ("hey", "length")
