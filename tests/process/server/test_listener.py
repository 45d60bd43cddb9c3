"""The HTTP port is bound before loading, and a port in use is reported at once."""

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
    listener = open_listener("127.0.0.1", 0, None)
    with listener.sock:
        assert listener.port > 0
        assert listener.url_of(tls=False) == f"http://127.0.0.1:{listener.port}"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on the loopback")
def test_tls_and_ipv6_urls() -> None:
    listener = open_listener("::1", 0, None)
    with listener.sock:
        assert listener.url_of(tls=True) == f"https://[::1]:{listener.port}"


def test_a_listening_neighbour_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port} is taken"):
            open_listener("127.0.0.1", port, None)


def test_two_servers_that_still_load_cannot_share_a_port() -> None:
    listener = open_listener("127.0.0.1", 0, None)
    with listener.sock, pytest.raises(UsageError, match="is taken"):
        open_listener("127.0.0.1", listener.port, None)


def test_nobody_can_connect_before_the_server_listens() -> None:
    listener = open_listener("127.0.0.1", 0, None)
    with listener.sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port), timeout=5)


def test_a_restart_is_not_refused_for_old_connections() -> None:
    listener = open_listener("127.0.0.1", 0, None)
    about_to_listen(listener.sock)
    listener.sock.listen()
    client = socket.create_connection(("127.0.0.1", listener.port), timeout=5)
    served, _ = listener.sock.accept()
    # Our side closes first, so our port keeps the connection in TIME_WAIT.
    served.close()
    client.close()
    listener.sock.close()
    with open_listener("127.0.0.1", listener.port, None).sock as restarted:
        assert restarted.getsockname()[1] == listener.port


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.1 is not an address of this host"):
        open_listener("192.0.2.1", 0, None)


def test_unix_socket_left_by_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "listener.sock")
    open_listener(None, 0, path).sock.close()
    listener = open_listener(None, 0, path)
    with listener.sock:
        assert listener.url_of(tls=False) == f"unix:{path}"
        listener.sock.listen()
        with pytest.raises(UsageError, match="--uds"):
            open_listener(None, 0, path)


def test_a_unix_socket_of_a_server_that_still_loads_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "listener.sock")
    holder = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", holder + "; input()", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        monkeypatch.chdir(tmp_path)
        for name in (path, "listener.sock"):
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
    with open_listener(None, 0, "listener.sock").sock, pytest.raises(UsageError, match="--uds"):
        open_listener(None, 0, str(tmp_path / "listener.sock"))
