"""vLLM's stock API server on a port that rank 0 has bound; runs in rank 0's child."""

import argparse
import signal

from spmd_serve.server.door import Door, about_to_listen


def serve_http(args: argparse.Namespace, door: Door, url: str) -> int:
    """Run vLLM's API server(s) on our socket until they are told to stop; returns the exit code."""
    import uvloop
    from vllm.entrypoints.cli import serve as vllm_serve
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.launcher import set_ulimit, validate_api_server_args

    from spmd_serve.server import endpoints

    validate_api_server_args(args)
    set_ulimit()
    args.port = door.port
    several = args.api_server_count if args.api_server_count is not None else args.data_parallel_size
    if several > 1:
        about_to_listen(door.sock)
        args.api_server_count = several
        # run_multi_api_server binds by itself; ours is bound already.
        vllm_serve.setup_server = lambda args, *, reuse_port: (url, door.sock)
        vllm_serve.run_multi_api_server(args)
        return 0
    args.api_server_count = None
    endpoints.LISTENING = door.sock

    def interrupt_loading(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    signal.signal(signal.SIGTERM, interrupt_loading)
    uvloop.run(entry.run_server_worker(url, door.sock, args))
    return 0
