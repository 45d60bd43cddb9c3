"""Servers that several modules ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.server import Server
from tests.support.endpoint import NAME, Endpoint
from tests.support.stock import server_command, server_environ

KEY = "secret-of-the-test"
# What the server under test is given as well, so that both answer all kinds of questions.
API_FLAGS = (
    f"--served-model-name={NAME}",
    "--max-num-seqs=24",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    '--structured-outputs-config={"backend":"xgrammar","disable_any_whitespace":true}',
    "--max-logprobs=10",
    f"--api-key={KEY}",
)


def lora_flags(adapter: Path) -> list[str]:
    """Serve the tiny adapter as a model of its own."""
    return ["--enable-lora", "--max-lora-rank=8", f"--lora-modules=adapter={adapter}"]


@pytest.fixture(scope="session")
def stock_vllm(
    tiny_qwen3: Path, tiny_lora: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    """Stock vLLM's own server, one rank: the reference for whole answers."""
    port = free_port()
    command = server_command(tiny_qwen3, port, flags=[*API_FLAGS, *lora_flags(tiny_lora)])
    log = tmp_path_factory.mktemp("stock") / "log"
    url = f"http://127.0.0.1:{port}"
    with Server(command, log, environ=server_environ(), ready_url=f"{url}/health"):
        yield Endpoint(url, KEY)
