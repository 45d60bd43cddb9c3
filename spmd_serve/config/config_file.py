"""What ``--config FILE`` stands for: the file's flags as words of the command line, as vLLM has them."""

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_serve.errors import UsageError


def expand(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The command line with what its ``--config FILE`` holds in its place, if it has one.

    The file's flags come first, after a leading model, so that the command line wins. `parser` knows which
    flags have a ``--no-`` form (for false), and which are repeated (for lists). A process reads the file
    once. Raises UsageError naming it.
    """
    words = [part for word in words for part in _split(word)]
    if "--config" not in words:
        return words
    if words.count("--config") > 1:
        raise UsageError(f"--config is given {words.count('--config')} times: write all flags into one file")
    place = words.index("--config")
    if place + 1 == len(words):
        raise UsageError("--config names no file: write --config FILE.yaml")
    content = _words(_read(words[place + 1]), parser)
    rest = words[:place] + words[place + 2 :]
    first = 0 if place == 0 or words[0].startswith("-") else 1
    return rest[:first] + content + rest[first:]


def _split(word: str) -> tuple[str, ...]:
    """``--config=FILE`` as two words."""
    name, equals, value = word.partition("=")
    return (name, value) if equals and name == "--config" else (word,)


def _words(content: Mapping[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """As `FlexibleArgumentParser.load_config_file`, save that a flag that is to be repeated is repeated."""
    known = parser._option_string_actions
    words: list[str] = []
    for name, value in content.items():
        flag = f"--{name}"
        if value is True:
            words.append(flag)
        elif value is False:
            if (no := f"--no-{name}") in known:
                words.append(no)
        elif isinstance(value, list):
            items = [str(item) for item in value]
            action = known.get(flag.replace("_", "-"))
            if isinstance(action, argparse._AppendAction) and action.nargs is None:
                words += [part for item in items for part in (flag, item)]
            elif items:
                words += [flag, *items]
        else:
            words += [flag, json.dumps(value, default=str) if isinstance(value, dict) else str(value)]
    return words


@functools.cache
def _read(path: str) -> Mapping[str, Any]:
    import yaml  # comes with vLLM

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as problem:
        raise UsageError(f"--config {path} cannot be read: {problem.strerror or problem}") from problem
    except (yaml.YAMLError, ValueError) as problem:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(problem).split())}") from problem
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} holds no flags: write one on each line, such as port: 8000")
    return content
