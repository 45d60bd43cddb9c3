"""vLLM's stock API server on a port that its rank has bound; runs in that rank's child."""

import argparse
import os
from functools import partial
from typing import Any

from spmd_serve.control import ADDITIONAL_CONFIG_KEY
from spmd_serve.server.door import Door, about_to_listen


def serve_http(args: argparse.Namespace, door: Door, url: str) -> int:
    """Run vLLM's API server(s) on our socket until they are told to stop; returns the exit code."""
    import uvloop
    from vllm.entrypoints.cli import serve as vllm_serve
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.launcher import set_ulimit, validate_api_server_args

    from spmd_serve.engine.seam import check_server
    from spmd_serve.server import endpoints

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
        # run_multi_api_server binds by itself; ours is bound already.
        vllm_serve.setup_server = lambda args, *, reuse_port: (url, door.sock)
        start = partial(vllm_serve.APIServerProcessManager, target_server_fn=serve_as_one_of_several)

        def start_and_leave(**given: Any) -> Any:
            servers = start(**given)
            door.sock.close()  # theirs now: a door that nobody is behind any more must not stay open
            return servers

        vllm_serve.APIServerProcessManager = start_and_leave
        vllm_serve.run_multi_api_server(args)
        return 0
    args.api_server_count = None
    endpoints.LISTENING = door.sock
    uvloop.run(entry.run_server_worker(url, door.sock, args))
    return 0


def serve_as_one_of_several(listen_address: str, sock: Any, args: argparse.Namespace, config: Any) -> None:
    """The main function of each of several API servers, in a spawned process of its own."""
    from vllm.v1.utils import run_api_server_worker_proc

    number_replicas(args)
    run_api_server_worker_proc(listen_address, sock, args, config)


def number_replicas(args: argparse.Namespace) -> None:
    """Have metrics and logs of this process name replicas by their numbers in the job."""
    from spmd_serve.engine.seam import count_engines_from

    first = args.additional_config[ADDITIONAL_CONFIG_KEY]["first_replica"]
    if first > 0:
        count_engines_from(first)
