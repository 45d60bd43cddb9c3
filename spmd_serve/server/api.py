"""vLLM's API server on the port that its rank has bound; runs in that rank's child process."""

import argparse
import os
import signal
from functools import partial
from typing import Any

from spmd_serve.config.job_spec import ADDITIONAL_CONFIG_KEY, JobSpec
from spmd_serve.liveness import WatcherLink, keep_answering
from spmd_serve.server.listener import HttpListener, about_to_listen

LEAVE_S = 2
"""Seconds that a connection may stay open after the drain if its client does not read, or keeps it alive."""


def serve_http(args: argparse.Namespace, listener: HttpListener, url: str) -> int:
    """Run vLLM's API server or servers on the listener's socket until SIGTERM, and return the exit code."""
    import uvloop
    from vllm.entrypoints.cli import serve as vllm_serve
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.launcher import set_ulimit, validate_api_server_args

    from spmd_serve.engine.vllm_compat import check_server
    from spmd_serve.server import routes

    check_server()
    validate_api_server_args(args)
    set_ulimit()
    args.port = listener.port
    # Engine cores are forked: a copy of the socket in them would keep clients waiting after the server's end.
    os.register_at_fork(after_in_child=listener.sock.close)
    number_replicas(args)
    several = args.api_server_count or args.data_parallel_size_local or args.data_parallel_size
    if several > 1:
        about_to_listen(listener.sock)
        args.api_server_count = several
        use_listener(listener, url)
        vllm_serve.run_multi_api_server(args)
        return 0
    args.api_server_count = None
    routes.LISTENING = listener.sock
    uvloop.run(entry.run_server_worker(url, listener.sock, args, timeout_graceful_shutdown=LEAVE_S))
    return 0


def use_listener(listener: HttpListener, url: str) -> None:
    """Make vLLM's run_multi_api_server use our socket, and exit at once on a SIGTERM while engines load."""
    from vllm.entrypoints.cli import serve as vllm_serve

    start = partial(vllm_serve.APIServerProcessManager, target_server_fn=serve_as_one_of_several)
    wait = vllm_serve.wait_for_completion_or_failure
    loading_handler = signal.getsignal(signal.SIGTERM)
    vllm_handlers: list[Any] = []

    def bound(args: argparse.Namespace, *, reuse_port: bool) -> tuple[str, Any]:
        # vLLM has just set its handler, which would wait for loading engines and then kill them.
        vllm_handlers.append(signal.signal(signal.SIGTERM, loading_handler))
        return url, listener.sock

    def start_and_close(**given: Any) -> Any:
        servers = start(**given)
        listener.sock.close()  # else the port would accept connections after the servers' end
        return servers

    def wait_for_the_end(**given: Any) -> None:
        signal.signal(signal.SIGTERM, vllm_handlers.pop())
        wait(**given)

    vllm_serve.setup_server = bound
    vllm_serve.APIServerProcessManager = start_and_close
    vllm_serve.wait_for_completion_or_failure = wait_for_the_end


def serve_as_one_of_several(listen_address: str, sock: Any, args: argparse.Namespace, config: Any) -> None:
    """Run one of several API servers: the main function of a spawned process."""
    from vllm.v1.utils import run_api_server_worker_proc

    link: WatcherLink | None = None

    def leave(*_: object) -> None:
        """Exit on a SIGTERM while this server loads; later vLLM has its own handler."""
        if link is not None:
            link.leaving()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    number_replicas(args)
    spec = JobSpec.from_json(args.additional_config[ADDITIONAL_CONFIG_KEY])
    hello = {"kind": "api", "name": f"API server {config['client_index']}", "rank": None}
    link = WatcherLink.connect(spec.watcher, hello, spec.join_timeout_s, on_root_cause=keep_answering)
    run_api_server_worker_proc(listen_address, sock, args, config, timeout_graceful_shutdown=LEAVE_S)
    link.leaving()


def number_replicas(args: argparse.Namespace) -> None:
    """Number replicas as in the whole job in the metrics and logs of this process."""
    from spmd_serve.engine.vllm_compat import count_engines_from

    first = args.additional_config[ADDITIONAL_CONFIG_KEY]["first_replica"]
    if first > 0:
        count_engines_from(first)
