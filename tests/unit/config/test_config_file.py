"""``--config FILE``: the file's flags are flags of the command line, ours and vLLM's."""

import argparse
from pathlib import Path

import pytest

from spmd_serve.config.config_file import expand
from spmd_serve.config.flags import preparse
from spmd_serve.errors import UsageError

MIXED = """
model: some/model
tensor-parallel-size: 1
enable-prefix-caching: false
enforce-eager: true
disable-log-stats: false
served-model-name: [a, b]
api-key: []
compilation-config:
  pass_config: {fuse_allreduce_rms: true}
max_model_len: 1k
port: 8123
"""


def file(folder: Path, text: str) -> str:
    path = folder / "flags.yaml"
    path.write_text(text)
    return str(path)


def test_our_flags_and_the_address_are_read_from_the_file(tmp_path: Path) -> None:
    content = """
host: 127.0.0.1
port: 9000
uds: /run/http
head: node1
join-timeout: 7
control_backend: gloo
data-parallel-hybrid-lb: true
control-allow-class: [a:B, c:D]
"""
    parsed = preparse(["m", "--config", file(tmp_path, content)])
    assert (parsed.host, parsed.ports, parsed.uds) == ("127.0.0.1", (9000,), "/run/http")
    assert (parsed.flags.head, parsed.flags.join_timeout) == ("node1", 7.0)
    assert (parsed.flags.control_backend, parsed.flags.lb) == ("gloo", "hybrid")
    assert parsed.flags.control_allow_class == ("a:B", "c:D")


@pytest.mark.parametrize(
    "words", [["batch", "m", "--config", "{}", "--port=1"], ["m", "--port", "1", "--config={}"]]
)
def test_the_command_line_wins(tmp_path: Path, words: list[str]) -> None:
    path = file(tmp_path, "port: 2\nhost: here\n")
    parsed = preparse([word.format(path) for word in words])
    assert (parsed.ports, parsed.host) == ((1,), "here")


def test_a_bad_value_in_the_file_is_named_like_one_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rank-timeout must be above 0 seconds"):
        preparse(["m", "--config", file(tmp_path, "rank-timeout: 0")])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"port: [", "is not YAML: while parsing"),
        (b"\xff\xfe\xfa", "is not YAML"),
        (b"", "holds no flags"),
        (b"- port", "holds no flags"),
    ],
)
def test_a_file_that_is_no_use_is_named_in_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "flags.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        preparse(["m", "--config", str(path)])
    assert str(caught.value).startswith(f"--config {path} {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [["--config"], ["--config", "a", "--config=b"]])
def test_the_flag_needs_one_file(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"^--config "):
        preparse(["m", *words])


def test_a_model_comes_before_the_files_flags_and_the_rest_after_them(tmp_path: Path) -> None:
    path, parser = file(tmp_path, "names: [a, b]"), argparse.ArgumentParser()
    assert expand(["m", "-x", "--config", path, "-y"], parser) == ["m", "--names", "a", "b", "-x", "-y"]
    assert expand(["-x", "--config", path, "-y"], parser) == ["--names", "a", "b", "-x", "-y"]
    assert expand(["-x", "m"], parser) == ["-x", "m"]
