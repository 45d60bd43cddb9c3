"""The tools of the tests are tested too: a check that can't fail proves nothing."""

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness import processes
from harness.models import SHAPES, SPECIAL_TOKENS, Shape, byte_tokenizer, make_lora, make_model
from harness.ports import free_port
from harness.server import Server
from harness.torchrun import Rendezvous, plain_environ, torchrun_command
from harness.waiting import DeadlineError, wait_until
from tests.support import faults
from tests.support.netns import Hosts

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
# A child that outlives its parent's SIGTERM, as a careless server leaves one.
LEAVES_A_CHILD = (
    "import subprocess,sys,time; subprocess.Popen(['sleep','600']); print('up',flush=True); time.sleep(600)"
)
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print("port", server.getsockname()[1], socket.gethostname(), flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""
# Under the conftest.py of these tests, in a worker of pytest-xdist.
RUN = """
import subprocess
from tests import conftest

conftest.LEFT_OVER_DEADLINE_S = 0.5

def test_of_a_run(note):
    note("a figure")
    assert conftest.MUST_SIMULATE_HOSTS
    subprocess.Popen(["sleep", "600"])
"""


def test_every_test_file_holds_a_test() -> None:
    empty = []
    for file in Path(__file__).parent.rglob("test_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        if not any(name.startswith("test_") for name in names):
            empty.append(file.name)
    assert empty == []


def test_a_worker_shows_what_was_seen_and_fails_for_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "test_run.py").write_text(RUN)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-n", "1"]
    done = subprocess.run(
        [*command, "-c", os.devnull, f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env={**plain_environ(), "CI": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "test_run.py::test_of_a_run: a figure" in done.stdout
    assert "1 passed, 1 error" in done.stdout
    assert re.search(r"AssertionError: still there after 0\.5 s: \d+ \(sleep 600\)", done.stdout)


class TestWaiting:
    def test_the_answer_comes_back(self) -> None:
        answers = iter([0, None, "here"])
        assert wait_until(lambda: next(answers), 5, "an answer") == "here"

    def test_the_deadline_names_what_was_waited_for(self) -> None:
        with pytest.raises(DeadlineError, match=r"0\.1 s in vain for Godot"):
            wait_until(lambda: False, 0.1, "Godot")


class TestPorts:
    def test_ports_are_free_and_never_given_twice(self) -> None:
        ports = [free_port() for _ in range(20)]
        assert len(set(ports)) == 20
        with socket.create_server(("127.0.0.1", ports[0])):
            pass


class TestServer:
    def test_it_is_ready_at_its_line_and_ends_at_sigterm(self, tmp_path: Path) -> None:
        with Server(SLEEP, tmp_path / "log", ready_line="^up$", start_deadline_s=20) as server:
            assert processes.look(server.pid) is not None
        assert server.returncode == -signal.SIGTERM

    def test_it_is_ready_when_its_url_answers(self, tmp_path: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
        with Server(
            command, tmp_path / "log", ready_url=f"http://127.0.0.1:{port}/", start_deadline_s=20
        ) as server:
            assert server.returncode is None

    def test_one_that_ends_early_shows_its_log_and_code(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "import sys; print('no such flag'); sys.exit(2)"]
        with pytest.raises(AssertionError, match=r"(?s)exit code 2.*no such flag"):
            Server(command, tmp_path / "log", ready_line="ready", start_deadline_s=20).__enter__()

    def test_one_that_is_late_is_ended(self, tmp_path: Path) -> None:
        server = Server(SLEEP, tmp_path / "log", ready_line="never", start_deadline_s=0.5)
        with pytest.raises(AssertionError, match="in vain for a line like 'never'"):
            server.__enter__()
        assert server.returncode is not None

    def test_one_that_ignores_sigterm_is_killed_and_reported(self, tmp_path: Path) -> None:
        deaf = (
            "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
        )
        server = Server([sys.executable, "-c", deaf], tmp_path / "log", stop_deadline_s=0.5).start()
        server.wait_line("up", 20)
        with pytest.raises(AssertionError, match="had to be killed"):
            server.stop()
        assert server.returncode == -signal.SIGKILL

    def test_a_child_left_behind_is_found_and_ended(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", LEAVES_A_CHILD]
        server = Server(command, tmp_path / "log", gone_deadline_s=0.5).start()
        server.wait_line("up", 20)
        family = processes.descendants(server.pid)
        assert [process.command for process in family] == ["sleep 600"]
        with pytest.raises(AssertionError, match=r"still there after .*sleep 600"):
            server.stop()
        processes.assert_gone(family, 5)


class TestFaults:
    def test_a_frozen_process_stands_still_and_goes_on(self) -> None:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
            try:
                with faults.frozen(spinning.pid):
                    stopped = processes.look(spinning.pid)
                    assert stopped is not None and stopped.state == "T"
                wait_until(lambda: faults.state(spinning.pid) == "R", 5, "the process to go on")
            finally:
                faults.kill_nine(spinning.pid)

    @pytest.mark.slow
    def test_ranks_are_found_by_their_number_under_torchrun(self, tmp_path: Path) -> None:
        program = tmp_path / "ranks_for_the_support_test.py"
        program.write_text(
            "import os, subprocess\n"
            "child = subprocess.Popen(['sleep', '600'])\n"  # inherits RANK: must not be taken for the rank
            "print('started', os.environ['RANK'], os.getpid(), flush=True)\n"
            "child.wait()\n"
        )
        command = torchrun_command(2, [], module=program.stem)
        environ = plain_environ(PYTHONPATH=str(tmp_path))
        server = Server(command, tmp_path / "log", environ=environ).start()
        try:
            for rank in (0, 1):
                said = server.wait_line(rf"started {rank} (\d+)", 60)
                assert faults.pid_of_rank(server.pid, rank) == int(said[1])
        finally:
            server.kill()


class TestTorchrun:
    def test_one_agent_chooses_its_own_port(self) -> None:
        command = torchrun_command(2, ["MODEL", "-tp=2"])
        assert command[1:] == [
            *("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=0", "--standalone"),
            *("-m", "spmd_serve", "MODEL", "-tp=2"),
        ]

    def test_static_has_a_master_instead_of_an_endpoint(self) -> None:
        flags = Rendezvous("node0:29500", backend="static", node_rank=1).flags()
        assert flags == ["--nnodes=2", "--master-addr=node0", "--master-port=29500", "--node-rank=1"]

    def test_the_environment_is_a_users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        environ = plain_environ(MORE="1")
        assert "RANK" not in environ and "TORCHELASTIC_RUN_ID" not in environ
        assert environ["MORE"] == "1" and environ["PATH"] == os.environ["PATH"]


class TestModels:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_same_seed_gives_the_same_bytes(self, shape: Shape, tmp_path: Path) -> None:
        one, two, other = (
            make_model(shape, tmp_path / name, seed=seed) / "model.safetensors"
            for name, seed in (("one", 0), ("two", 0), ("other", 1))
        )
        assert one.read_bytes() == two.read_bytes() != other.read_bytes()
        assert one.stat().st_size < 10e6

    def test_the_tokenizer_has_one_token_per_byte(self) -> None:
        tokenizer = byte_tokenizer()
        text = "Ein Käse, 1 €!\n"
        tokens = tokenizer.encode(text).ids
        assert len(tokens) == len(text.encode()) and tokenizer.decode(tokens) == text
        assert all(tokenizer.encode(token).ids == [tokenizer.token_to_id(token)] for token in SPECIAL_TOKENS)

    def test_an_adapter_names_what_it_changes(self, tmp_path: Path) -> None:
        folder = make_lora(tmp_path)
        assert sorted(file.name for file in folder.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]


@pytest.mark.netns
@pytest.mark.usefixtures("can_simulate_hosts")
class TestHosts:
    def test_they_talk_over_tcp_until_one_is_cut_off_and_again_when_mended(self, tmp_path: Path) -> None:
        with Hosts("node0", "node1") as hosts:
            address = hosts.address("node0")
            command = hosts.command("node0", [sys.executable, "-c", LISTEN, address])
            with Server(
                command, tmp_path / "log", ready_line=r"^port \d+ node0$", start_deadline_s=20
            ) as server:
                port = int(server.wait_line(r"^port (\d+)", 5)[1])
                with hosts.inside("node1"), socket.create_connection((address, port), timeout=5) as client:
                    assert echo(client) == b"ping"
                    hosts.cut("node0")
                    client.settimeout(0.5)
                    with pytest.raises(TimeoutError):
                        echo(client)
                    hosts.mend("node0")
                    client.settimeout(20)
                    assert client.recv(4, socket.MSG_WAITALL) == b"ping"  # TCP sends again what got lost

    def test_each_has_its_own_name_and_nobody_else_sees_it(self) -> None:
        script = (
            "import socket\n"
            "print(socket.gethostname(), socket.gethostbyname('node0'), socket.gethostbyname('node1'))"
        )
        with Hosts("node0", "node1", own_name="loopback") as hosts:
            there = hosts.popen("node1", [sys.executable, "-c", script], stdout=subprocess.PIPE)
            said, _ = there.communicate(timeout=20)
            assert said.decode().split() == ["node1", hosts.address("node0"), "127.0.1.1"]
        assert socket.gethostname() != "node1"

    def test_nothing_of_them_is_left_also_after_an_error(self) -> None:
        with pytest.raises(ZeroDivisionError), Hosts("node0", "node1") as hosts:
            sleeper = hosts.popen("node0", ["sleep", "600"])
            wait_until(lambda: hosts.processes("node0"), 5, "the sleeper to start")
            raise ZeroDivisionError
        assert sleeper.wait(5) == -signal.SIGKILL
        assert [name for name in os.listdir("/run/netns") if name.startswith(f"spmd-{os.getpid()}-")] == []


def echo(client: socket.socket) -> bytes:
    """Sends "ping" and waits for it to come back."""
    client.sendall(b"ping")
    return client.recv(4, socket.MSG_WAITALL)
