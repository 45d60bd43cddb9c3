"""The flags of ``spmd_serve batch``: the fields are the flags, each default written once."""

import argparse
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from spmd_serve.errors import UsageError

STDIO = "-"
_STDOUT_PATHS = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")

PLAIN_MAX_TOKENS = 256
"""Tokens for a plain prompt where --max-tokens is not given (the API's own 16 would cut every text)."""

_TEMPERATURES = "how random: 0 takes the likeliest token (default: the model's generation config)"


def _flag(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


def _plain(text: str, **more: Any) -> Any:
    """A flag that only --prompts takes, and that goes into every request when given."""
    return field(default=None, metadata={"help": text, "plain": True, **more})


@dataclass(frozen=True)
class BatchOptions:
    """What ``spmd_serve batch`` is told beside vLLM's own flags."""

    input_file: str | None = _flag(
        None,
        "requests in the OpenAI batch format: a file or http(s) URL, plain or gzip, or - for standard input",
        short="-i",
    )
    output_file: str | None = _flag(
        None,
        "where answers go, each as it is finished: a file (with FILE.state beside it: a rerun goes on where "
        "it stopped), an http(s) URL (PUT at the end), or - for standard output (nothing can go on there)",
        short="-o",
    )
    prompts: str | None = _flag(
        None,
        "instead of -i: one prompt a line, or JSONL with a field 'prompt' (*.jsonl); - is standard input. "
        "Each gives a JSON line with line (its number), prompt, text, finish_reason, usage, error, and the "
        "other fields of its JSONL line; with --n above 1, text and finish_reason are lists",
    )
    ordered: bool = _flag(False, "put the output in the order of the input (a file: sorted at the end)")
    restart: bool = _flag(False, "throw away what the output holds, and begin anew")
    retry_failed: bool = _flag(False, "ask again for lines that failed in an earlier run on this output")
    max_errors: int | None = _flag(None, "stop when more than this many lines have failed", type=int)
    max_in_flight: int | None = _flag(
        None, "requests in the engine at a time (default: twice what it runs at a time)", type=int
    )
    output_tmp_dir: str | None = _flag(
        None, "directory for the answers until an output URL gets them (default: the current one)"
    )
    enable_metrics: bool = _flag(False, "serve Prometheus metrics on --host and --port while running")
    prompts_format: str = _flag(
        "auto", "what --prompts holds (auto: by the file's name)", choices=("auto", "text", "jsonl")
    )
    chat: bool | None = _plain("send each prompt as a user's chat message, through the chat template")
    system: str | None = _plain("system message before each prompt (with --chat)")
    max_tokens: int | None = _plain(f"tokens to generate at most (default: {PLAIN_MAX_TOKENS})", type=int)
    temperature: float | None = _plain(_TEMPERATURES, type=float)
    top_p: float | None = _plain(
        "sample from the likeliest tokens that together have this probability", type=float
    )
    top_k: int | None = _plain("sample from this many of the likeliest tokens", type=int)
    min_p: float | None = _plain(
        "sample from tokens at least this likely, relative to the likeliest", type=float
    )
    n: int | None = _plain("answers to each prompt (default: 1)", type=int)
    stop: tuple[str, ...] | None = _plain("text that ends the answer; may be repeated", action="append")
    sampling_seed: int | None = _plain("seed of every request (--seed is the engine's)", type=int)
    presence_penalty: float | None = _plain("penalty for tokens that occurred", type=float)
    frequency_penalty: float | None = _plain("penalty for tokens by how often they occurred", type=float)
    repetition_penalty: float | None = _plain("factor against tokens that occurred, 1 is none", type=float)

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add one argument per field to `parser`, in two groups of their own."""
        common = parser.add_argument_group("batch", "flags of spmd_serve batch")
        plain = parser.add_argument_group("plain prompts", "what to ask for with --prompts")
        for item in fields(cls):
            more = dict(item.metadata)
            group = plain if more.pop("plain", False) else common
            names = [*filter(None, [more.pop("short", None)]), "--" + item.name.replace("_", "-")]
            assert item.default is not MISSING
            if item.type in (bool, bool | None):
                more["action"] = "store_true"
            group.add_argument(*names, dest=item.name, default=item.default, **more)

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> "BatchOptions":
        """Take our fields out of a parsed namespace. Raises UsageError for values that cannot work."""
        values = {item.name: getattr(namespace, item.name) for item in fields(cls)}
        values["stop"] = tuple(values["stop"]) if values["stop"] else None
        options = cls(**values)
        options.check()
        return options

    @property
    def source(self) -> str:
        """The file, URL or ``-`` that holds the requests or prompts."""
        source = self.prompts if self.input_file is None else self.input_file
        assert source is not None
        return source

    @property
    def destination(self) -> str:
        """The file or URL for the answers, or ``-`` for standard output under any of its names."""
        assert self.output_file is not None
        # Standard output is redirected for log lines later, so its paths would name the wrong file.
        return STDIO if self.output_file in _STDOUT_PATHS else self.output_file

    @property
    def is_plain(self) -> bool:
        """Whether the input is prompts and not the OpenAI batch format."""
        return self.prompts is not None

    @property
    def is_jsonl(self) -> bool:
        """Whether plain prompts are fields of JSON lines."""
        if self.prompts_format == "auto":
            path = self.source.split("?", 1)[0] if is_url(self.source) else self.source
            return path.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))
        return self.prompts_format == "jsonl"

    def plain_values(self) -> dict[str, object]:
        """The flags for plain prompts that were given, by field name."""
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.metadata.get("plain")}
        return {name: value for name, value in given.items() if value is not None}

    def fingerprint(self) -> dict[str, str]:
        """Our flags that decide what is asked; all others may change between two runs on one output."""
        if not self.is_plain:
            return {}
        shown = {"--prompts-format": "jsonl" if self.is_jsonl else "text"}
        return shown | {
            "--" + name.replace("_", "-"): str(value) for name, value in self.plain_values().items()
        }

    def check(self) -> None:
        """Raises UsageError for flags that contradict each other or are out of range."""
        if self.input_file is None and self.prompts is None:
            raise UsageError("nothing to answer: give -i FILE (OpenAI batch format) or --prompts FILE")
        if self.input_file is not None and self.prompts is not None:
            raise UsageError("-i and --prompts exclude each other: the input is one or the other")
        if self.output_file is None:
            raise UsageError("no place for the answers: give -o FILE")
        if not self.is_plain:
            given = ", ".join("--" + name.replace("_", "-") for name in self.plain_values())
            if given:
                raise UsageError(f"{given}: only with --prompts; in a batch file each line's body says it")
            if self.prompts_format != "auto":
                raise UsageError("--prompts-format: only with --prompts")
        if self.system is not None and not self.chat:
            raise UsageError("--system: only with --chat")
        if self.restart and self.retry_failed:
            raise UsageError("--restart and --retry-failed exclude each other")
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name, least in (
            ("max_errors", 0),
            ("max_in_flight", 1),
            ("max_tokens", 1),
            ("n", 1),
            ("temperature", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1, got {self.top_p}")


def is_url(name: str) -> bool:
    """Whether an input or output is on a web server."""
    return name.startswith(("http://", "https://"))
