"""Plain prompts: convert each line to a request, and each answer to a short JSON line.

Out: ``{"line": 3, "prompt": …, "text": …, "finish_reason": …, "usage": {…}, "error": null}``, where `line`
counts the input's lines from 1. Other fields of a JSONL input line come back too. With --n above 1, text and
finish_reason are lists.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from spmd_serve.batch.options import PLAIN_MAX_TOKENS, BatchOptions
from spmd_serve.batch.request_lines import BadRequestLine, BatchLine, error_text, stand_in_id

_NOT_SENT = ("chat", "system", "sampling_seed")
_OURS = frozenset({"line", "prompt", "text", "finish_reason", "usage", "error"})


def parse_prompt(
    number: int, raw: bytes, options: BatchOptions
) -> tuple[BatchLine | BadRequestLine, Mapping[str, Any]]:
    """The request for one line, and the fields of that line that come back with its answer."""
    if not options.is_jsonl:
        try:
            text = raw.rstrip(b"\r\n").decode()
        except UnicodeDecodeError as problem:
            return BadRequestLine(number, f"not UTF-8: {problem.reason} at byte {problem.start}"), {
                "prompt": None
            }
        return _request(number, text, options), {"prompt": text}
    try:
        content = from_json(raw)
    except ValueError as problem:
        return BadRequestLine(number, f"not JSON: {problem}"), {"prompt": None}
    prompt = content.get("prompt") if isinstance(content, dict) else None
    if not isinstance(prompt, str):
        return BadRequestLine(number, "not a JSON object with a text in the field 'prompt'"), {"prompt": None}
    rest = {name: value for name, value in content.items() if name not in _OURS}
    return _request(number, prompt, options), {"prompt": prompt, **rest}


def _request(number: int, prompt: str, options: BatchOptions) -> BatchLine:
    given = options.plain_values()
    body: dict[str, Any] = {"max_tokens": PLAIN_MAX_TOKENS}
    body |= {name: value for name, value in given.items() if name not in _NOT_SENT}
    if options.stop:
        body["stop"] = list(options.stop)
    if options.sampling_seed is not None:
        body["seed"] = options.sampling_seed
    if not options.chat:
        return BatchLine(number, stand_in_id(number), "/v1/completions", {"prompt": prompt, **body})
    messages = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return BatchLine(number, stand_in_id(number), "/v1/chat/completions", {"messages": messages, **body})


def plain_output(
    number: int, fields: Mapping[str, Any], output: Mapping[str, Any], options: BatchOptions
) -> dict[str, Any]:
    """The short output line made of an OpenAI output object."""
    body = (output.get("response") or {}).get("body") or {}
    choices = sorted(body.get("choices") or [], key=lambda choice: choice.get("index", 0))
    texts = [
        choice["message"]["content"] if "message" in choice else choice.get("text") for choice in choices
    ]
    reasons = [choice.get("finish_reason") for choice in choices]
    several = (options.n or 1) > 1
    return {
        "line": number,
        "prompt": fields["prompt"],
        "text": texts if several else next(iter(texts), None),
        "finish_reason": reasons if several else next(iter(reasons), None),
        "usage": body.get("usage"),
        "error": error_text(output),
        **{name: value for name, value in fields.items() if name != "prompt"},
    }
