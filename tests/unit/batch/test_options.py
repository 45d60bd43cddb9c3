"""The flags of spmd_serve batch: what they parse to, what is refused, what counts for a rerun."""

import argparse

import pytest

from spmd_serve.batch.options import BatchOptions
from spmd_serve.batch.prepare import answer_flags
from spmd_serve.errors import UsageError


def parse(*words: str) -> BatchOptions:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    BatchOptions.add_to(parser)
    return BatchOptions.from_namespace(parser.parse_args(words))


def test_batch_format() -> None:
    options = parse("-i", "in.jsonl", "-o", "out.jsonl", "--ordered", "--max-errors", "3")
    assert (options.source, options.destination) == ("in.jsonl", "out.jsonl")
    assert (options.ordered, options.max_errors, options.is_plain) == (True, 3, False)
    assert options.fingerprint() == {}


def test_plain_prompts() -> None:
    options = parse(
        "--prompts", "p.txt", "-o", "o.jsonl", "--chat", "--stop", "a", "--stop", "b", "--temperature", "0"
    )
    assert options.is_plain and not options.is_jsonl
    assert options.plain_values() == {"chat": True, "stop": ("a", "b"), "temperature": 0.0}
    assert options.fingerprint() == {
        "--prompts-format": "text",
        "--chat": "True",
        "--stop": "('a', 'b')",
        "--temperature": "0.0",
    }


@pytest.mark.parametrize("name", ["p.jsonl", "p.NDJSON", "p.jsonl.gz", "http://host/p.jsonl?sig=x.txt"])
def test_jsonl_by_name(name: str) -> None:
    assert parse("--prompts", name, "-o", "o").is_jsonl


def test_jsonl_by_flag() -> None:
    assert parse("--prompts", "-", "-o", "o", "--prompts-format", "jsonl").is_jsonl
    assert not parse("--prompts", "p.jsonl", "-o", "o", "--prompts-format", "text").is_jsonl


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["-o", "o"], "give -i FILE"),
        (["-i", "i"], "give -o FILE"),
        (["-i", "i", "--prompts", "p", "-o", "o"], "exclude each other"),
        (["-i", "i", "-o", "o", "--temperature", "0", "--n", "2"], "--temperature, --n: only with --prompts"),
        (["-i", "i", "-o", "o", "--prompts-format", "text"], "--prompts-format: only with --prompts"),
        (["--prompts", "p", "-o", "o", "--system", "x"], "--system: only with --chat"),
        (["-i", "i", "-o", "o", "--restart", "--retry-failed"], "--restart and --retry-failed"),
        (["-i", "i", "-o", "o", "--max-in-flight", "0"], "--max-in-flight must be at least 1, got 0"),
        (["-i", "i", "-o", "o", "--max-errors", "-1"], "--max-errors must be at least 0, got -1"),
        (["--prompts", "p", "-o", "o", "--top-p", "1.5"], "--top-p must be above 0"),
        (["--prompts", "p", "-o", "o", "--temperature", "nan"], "--temperature must be at least 0"),
    ],
)
def test_refused(words: list[str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse(*words)


def test_answer_flags() -> None:
    defaults = {
        "model": None,
        "dtype": "auto",
        "max_num_seqs": None,
        "api_key": None,
        "data_parallel_size": 1,
        "ordered": False,
    }
    given = {
        "model": "m",
        "dtype": "auto",
        "max_num_seqs": 8,
        "api_key": ["secret"],
        "data_parallel_size": 2,
        "ordered": True,
        "unknown": 1,
    }
    assert answer_flags(given, defaults) == {"--model": "m"}


@pytest.mark.parametrize("path", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_every_name_of_standard_output_is_standard_output(path: str) -> None:
    assert BatchOptions(input_file="in", output_file=path).destination == "-"
