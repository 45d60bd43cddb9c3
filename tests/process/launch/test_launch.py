"""The recipes in launch/ are runnable files: what torchrun is told is what their heads promise."""

import os
import re
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.server import Server

Documents = dict[tuple[str, str], dict[str, Any]]  # Kubernetes' objects by kind and name

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "launch"
CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,join_timeout=600"
RECIPES = ["single_node.sh", "multi_node_c10d.sh", "multi_node_static.sh", "slurm.sbatch"]

# Stands for torchrun, srun and scontrol: says what it was told, and starts what srun would.
FAKES = {
    "torchrun": 'printf "%s\\n" "$@"',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "scontrol": "printf 'node7\\nnode8\\n'",
}


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    for name, script in FAKES.items():
        file = tmp_path / name
        file.write_text(f"#!/usr/bin/env bash\n{script}\n")
        file.chmod(0o755)
    return tmp_path


def told(fakes: Path, script: str, *arguments: str, **variables: str) -> list[str]:
    """What torchrun is told by a recipe with these environment variables."""
    environ = {"PATH": f"{fakes}:{os.environ['PATH']}", **variables}
    done = run(["bash", str(LAUNCH / script), *arguments], environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(command: list[str], environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_one_machine(fakes: Path) -> None:
    assert told(fakes, "single_node.sh", "--dtype", "float32", MODEL="m", GPUS="2", PORT="81") == [
        *("--standalone", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("-m", "spmd_serve", "m", "--port", "81", "--dtype", "float32"),
    ]


def test_several_machines_by_c10d(fakes: Path) -> None:
    assert told(fakes, "multi_node_c10d.sh", "-pp", "2", MODEL="m", HEAD="node0") == [
        *("--nnodes", "2", "--nproc-per-node", "gpu", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--rdzv-id", "spmd_serve"),
        *("--rdzv-conf", CONF, "-m", "spmd_serve", "m", "--port", "8000", "-pp", "2"),
    ]


def test_several_machines_with_fixed_numbers(fakes: Path) -> None:
    lines = told(
        fakes, "multi_node_static.sh", MODEL="m", HEAD="node0", NODES="3", NODE_RANK="1", ADDRESS="10.0.0.2"
    )
    assert lines == [
        *("--nnodes", "3", "--node-rank", "1", "--nproc-per-node", "gpu", "--max-restarts", "3"),
        *("--master-addr", "node0", "--master-port", "29500", "--local-addr", "10.0.0.2"),
        *("-m", "spmd_serve", "m", "--port", "8000"),
    ]


def test_slurm_meets_on_the_first_node_of_the_job(fakes: Path) -> None:
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "1234", "SLURM_JOB_NUM_NODES": "2"}
    assert told(fakes, "slurm.sbatch", "-pp", "2", MODEL="m", SLURM_GPUS_ON_NODE="4", **job) == [
        *("--nnodes", "2", "--nproc-per-node", "4", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:21234", "--rdzv-id", "1234"),
        *("--rdzv-conf", CONF, "-m", "spmd_serve", "m", "--port", "8000", "-pp", "2"),
    ]


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_without_a_model_says_so(script: str, fakes: Path) -> None:
    job = {"SLURM_JOB_NODELIST": "node0", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    environ = {"PATH": f"{fakes}:{os.environ['PATH']}", "HEAD": "node0", "NODE_RANK": "0", **job}
    done = run(["bash", str(LAUNCH / script)], environ)
    assert done.returncode != 0
    assert "set MODEL to a folder or a hub name" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", RECIPES)
def test_every_variable_of_a_recipe_is_explained_in_its_head(script: str) -> None:
    text = (LAUNCH / script).read_text()
    head, _, body = text.partition("set -euo pipefail")
    used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", body)) - {"HEAD"}
    used = {name for name in used if not name.startswith("SLURM_")}
    assert used
    assert [name for name in sorted(used) if not re.search(rf"\b{name}\b", head)] == []


class TestKubernetes:
    @pytest.fixture
    def documents(self) -> Documents:
        loaded = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
        return {(document["kind"], document["metadata"]["name"]): document for document in loaded}

    @pytest.fixture
    def container(self, documents: Documents) -> dict[str, Any]:
        pod = documents["StatefulSet", "spmd-serve"]["spec"]["template"]["spec"]
        container: dict[str, Any] = pod["containers"][0]
        return container

    def test_names_agree(self, documents: Documents, container: dict[str, Any]) -> None:
        pods = documents["StatefulSet", "spmd-serve"]["spec"]
        environ = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert ("Service", pods["serviceName"]) in documents
        assert environ["HEAD"] == f"spmd-serve-0.{pods['serviceName']}"
        assert environ["NODES"] == str(pods["replicas"])
        assert environ["GPUS"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
        labels = pods["template"]["metadata"]["labels"]
        assert pods["selector"]["matchLabels"] == labels
        assert documents["Service", "spmd-serve-nodes"]["spec"]["selector"] == labels

    def test_the_command_is_the_c10d_recipe(self, fakes: Path, container: dict[str, Any]) -> None:
        environ = {entry["name"]: entry.get("value", "10.0.0.2") for entry in container["env"]}
        filled = [
            re.sub(r"\$\((\w+)\)", lambda name: environ[name[1]], word) for word in container["command"]
        ]
        recipe = told(fakes, "multi_node_c10d.sh", **environ)
        assert filled[0] == "torchrun"
        assert " ".join(filled[1:]).replace("=", " ") == " ".join(
            [*recipe[:-2], "-tp", "8", "-pp", "2", "--probe-port", "8001", *recipe[-2:]]
        ).replace("=", " ")

    def test_probes_ask_the_probe_port(self, container: dict[str, Any]) -> None:
        ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
        assert f"--probe-port={ports['probes']}" in container["command"]
        for name in ("startupProbe", "readinessProbe"):
            assert container[name]["httpGet"] == {"path": "/ready", "port": "probes"}


class TestQuickstart:
    """What of it needs no model: the rest is tested end to end."""

    @pytest.fixture
    def taken_port(self) -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()[1]

    def test_a_taken_port_is_said_at_once(self, taken_port: int) -> None:
        done = run([str(LAUNCH / "quickstart.sh"), "--port", str(taken_port)], dict(os.environ))
        assert done.returncode == 1
        assert done.stderr == f"quickstart.sh: port {taken_port} is taken: choose another with --port N\n"

    def test_unknown_arguments_are_refused(self) -> None:
        done = run([str(LAUNCH / "quickstart.sh"), "--prot", "1"], dict(os.environ))
        assert done.returncode == 2 and "--prot" in done.stderr

    def test_help_shows_how_to_use_it(self) -> None:
        done = run([str(LAUNCH / "quickstart.sh"), "--help"], dict(os.environ))
        assert done.returncode == 0 and "launch/quickstart.sh [--once] [--port N]" in done.stdout


class TestEnvironment:
    """launch/environment.sh, which the scripts share."""

    def script(self, body: str) -> list[str]:
        return ["bash", "-c", f"set -euo pipefail; source {LAUNCH}/environment.sh; {body}", "name.sh"]

    def test_a_failed_step_is_one_line_with_the_reason(self) -> None:
        done = run(
            self.script("run_step 'cooking' bash -c 'echo first; echo no salt; exit 3'"), dict(os.environ)
        )
        assert done.returncode == 1
        line = done.stderr.splitlines()
        assert len(line) == 1 and line[0].startswith(
            "name.sh: cooking failed: no salt (exit code 3, all of it in "
        )
        Path(line[0].rpartition(" ")[2].rstrip(")")).unlink()

    def test_sigterm_ends_the_running_step_and_cleans_up(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        body = "clean_up() { echo cleaned after $1; }; run_step sleeping sleep 600"
        server = Server(self.script(body), log).start()
        server.wait_line("sleeping", 20)
        assert server.stop() == 143  # and nothing that it had started is left
        assert log.read_text().endswith("cleaned after 143\n")


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"spmd-serve:{project['version']}" in (LAUNCH / "kubernetes.yaml").read_text()
