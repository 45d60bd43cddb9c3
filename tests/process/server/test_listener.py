"""The HTTP port is ours from before loading on, and a taken one is said at once."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_serve.errors import UsageError
from spmd_serve.server.listener import about_to_listen, open_listener


def has_ipv6() -> bool:
    """Whether this machine's loopback has an IPv6 address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_port_0_is_chosen_by_the_kernel_and_shown_in_the_url() -> None:
    door = open_listener("127.0.0.1", 0, None)
    with door.sock:
        assert door.port > 0
        assert door.url_of(tls=False) == f"http://127.0.0.1:{door.port}"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on the loopback")
def test_tls_and_ipv6_urls() -> None:
    door = open_listener("::1", 0, None)
    with door.sock:
        assert door.url_of(tls=True) == f"https://[::1]:{door.port}"


def test_a_listening_neighbour_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port} is taken"):
            open_listener("127.0.0.1", port, None)


def test_two_servers_that_still_load_cannot_share_a_port() -> None:
    door = open_listener("127.0.0.1", 0, None)
    with door.sock, pytest.raises(UsageError, match="is taken"):
        open_listener("127.0.0.1", door.port, None)


def test_nobody_can_connect_before_the_server_listens() -> None:
    door = open_listener("127.0.0.1", 0, None)
    with door.sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", door.port), timeout=5)


def test_a_restart_is_not_refused_for_old_connections() -> None:
    door = open_listener("127.0.0.1", 0, None)
    about_to_listen(door.sock)
    door.sock.listen()
    client = socket.create_connection(("127.0.0.1", door.port), timeout=5)
    served, _ = door.sock.accept()
    # Our side closes first, so our port keeps the connection in TIME_WAIT.
    served.close()
    client.close()
    door.sock.close()
    with open_listener("127.0.0.1", door.port, None).sock as again:
        assert again.getsockname()[1] == door.port


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.1 is not an address of this host"):
        open_listener("192.0.2.1", 0, None)


def test_unix_socket_left_by_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "door.sock")
    open_listener(None, 0, path).sock.close()
    door = open_listener(None, 0, path)
    with door.sock:
        assert door.url_of(tls=False) == f"unix:{path}"
        door.sock.listen()
        with pytest.raises(UsageError, match="--uds"):
            open_listener(None, 0, path)


def test_a_unix_socket_of_a_server_that_still_loads_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "door.sock")
    holder = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", holder + "; input()", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        monkeypatch.chdir(tmp_path)
        for name in (path, "door.sock"):
            with pytest.raises(UsageError, match=f"--uds {path} cannot be bound: Address already in use"):
                open_listener(None, 0, name)
        with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        other.kill()
    open_listener(None, 0, path).sock.close()


def test_two_servers_that_still_load_cannot_share_a_unix_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_listener(None, 0, "door.sock").sock, pytest.raises(UsageError, match="--uds"):
        open_listener(None, 0, str(tmp_path / "door.sock"))
