"""The recipes in launch/ run for real: tiny models, ranks on the CPU, simulated hosts."""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ports import free_port
from harness.server import Server
from harness.torchrun import plain_environ
from tests.support.netns import Hosts
from tests.support.stock import ENVIRON, PROMPTS, SMALL_FLAGS, Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LAUNCH = Path(__file__).parents[2] / "launch"
PORT = 8000  # inside simulated hosts every port is free


def environ(**variables: str) -> dict[str, str]:
    """A user's shell in which `torchrun` is this Python's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return plain_environ(**ENVIRON, PATH=path, RESTARTS="0", **variables)


def answers(address: str, port: int, model: Path) -> list[str]:
    """What the server generates greedily for two prompts."""
    body = {"model": str(model), "prompt": list(PROMPTS[:2]), "max_tokens": 16, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"http://{address}:{port}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [choice["text"] for choice in json.load(answer)["choices"]]


@pytest.fixture
def expected(tiny_qwen3: Path, reference: Reference) -> list[str]:
    return [answer.text[:16] for answer in reference.greedy(tiny_qwen3)[:2]]


@pytest.fixture
def hosts(can_simulate_hosts: None) -> Iterator[Hosts]:
    with Hosts("node0", "node1") as hosts:
        yield hosts


def test_single_node(tiny_qwen3: Path, expected: list[str], tmp_path: Path) -> None:
    port = free_port()
    variables = environ(MODEL=str(tiny_qwen3), GPUS="2", PORT=str(port))
    command = [str(LAUNCH / "single_node.sh"), *SMALL_FLAGS]
    with Server(command, tmp_path / "log", environ=variables, ready_line="^spmd_serve.*ready"):
        assert answers("127.0.0.1", port, tiny_qwen3) == expected


@pytest.mark.netns
@pytest.mark.parametrize("script", ["multi_node_c10d.sh", "multi_node_static.sh"])
def test_several_nodes(
    script: str, hosts: Hosts, tiny_qwen3: Path, expected: list[str], tmp_path: Path
) -> None:
    servers = {}
    for number, host in enumerate(hosts.names):
        variables = environ(
            MODEL=str(tiny_qwen3),
            HEAD="node0",
            GPUS="1",
            NODE_RANK=str(number),
            ADDRESS=hosts.address(host),
        )
        command = hosts.command(host, [str(LAUNCH / script), *SMALL_FLAGS])
        ready = "^spmd_serve.*ready" if host == "node0" else None
        servers[host] = Server(command, tmp_path / host, environ=variables, ready_line=ready)
    with servers["node1"], servers["node0"], hosts.inside("node1"):
        assert answers(hosts.address("node0"), PORT, tiny_qwen3) == expected


@pytest.mark.timeout(600)
def test_quickstart(tmp_path: Path) -> None:
    command = [str(LAUNCH / "quickstart.sh"), "--once", "--port", str(free_port())]
    variables = plain_environ(VIRTUAL_ENV=sys.prefix)
    server = Server(command, tmp_path / "log", environ=variables)
    with server:
        assert server.wait_exit(580) == 0, server.text()
    assert "answer: The capital of France is Paris." in server.text()
