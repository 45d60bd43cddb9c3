"""vLLM's stock API server on a port that its rank has bound; runs in that rank's child."""

import argparse
import os
import signal
from functools import partial
from typing import Any

from spmd_serve.config.job_spec import ADDITIONAL_CONFIG_KEY, JobSpec
from spmd_serve.liveness import WatcherLink, keep_answering
from spmd_serve.server.listener import Listener, about_to_listen

LEAVE_S = 2
"""How long after the drain a connection may stay open whose client does not read, or keeps it for later."""


def serve_http(args: argparse.Namespace, door: Listener, url: str) -> int:
    """Run vLLM's API server(s) on our socket until they are told to stop; returns the exit code."""
    import uvloop
    from vllm.entrypoints.cli import serve as vllm_serve
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.launcher import set_ulimit, validate_api_server_args

    from spmd_serve.engine.vllm_compat import check_server
    from spmd_serve.server import routes

    check_server()
    validate_api_server_args(args)
    set_ulimit()
    args.port = door.port
    # Engine cores are forked: with a copy of the socket they would keep clients waiting behind a closed door.
    os.register_at_fork(after_in_child=door.sock.close)
    number_replicas(args)
    several = args.api_server_count or args.data_parallel_size_local or args.data_parallel_size
    if several > 1:
        about_to_listen(door.sock)
        args.api_server_count = several
        several_behind(door, url)
        vllm_serve.run_multi_api_server(args)
        return 0
    args.api_server_count = None
    routes.LISTENING = door.sock
    uvloop.run(entry.run_server_worker(url, door.sock, args, timeout_graceful_shutdown=LEAVE_S))
    return 0


def several_behind(door: Listener, url: str) -> None:
    """Have vLLM's run_multi_api_server use our socket, and leave at once when told to while engines load."""
    from vllm.entrypoints.cli import serve as vllm_serve

    start = partial(vllm_serve.APIServerProcessManager, target_server_fn=serve_as_one_of_several)
    wait = vllm_serve.wait_for_completion_or_failure
    early = signal.getsignal(signal.SIGTERM)
    late: list[Any] = []

    def bound(args: argparse.Namespace, *, reuse_port: bool) -> tuple[str, Any]:
        # vLLM has set its handler just before; while engines load that one would wait, and then kill them.
        late.append(signal.signal(signal.SIGTERM, early))
        return url, door.sock

    def start_and_leave(**given: Any) -> Any:
        servers = start(**given)
        door.sock.close()  # theirs now: a door that nobody is behind any more must not stay open
        return servers

    def wait_for_the_end(**given: Any) -> None:
        signal.signal(signal.SIGTERM, late.pop())
        wait(**given)

    vllm_serve.setup_server = bound
    vllm_serve.APIServerProcessManager = start_and_leave
    vllm_serve.wait_for_completion_or_failure = wait_for_the_end


def serve_as_one_of_several(listen_address: str, sock: Any, args: argparse.Namespace, config: Any) -> None:
    """The main function of each of several API servers, in a spawned process of its own."""
    from vllm.v1.utils import run_api_server_worker_proc

    link: WatcherLink | None = None

    def leave(*_: object) -> None:
        """Told to end while this one still loads, though another serves; later vLLM has its own handler."""
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
    """Have metrics and logs of this process name replicas by their numbers in the job."""
    from spmd_serve.engine.vllm_compat import count_engines_from

    first = args.additional_config[ADDITIONAL_CONFIG_KEY]["first_replica"]
    if first > 0:
        count_engines_from(first)
