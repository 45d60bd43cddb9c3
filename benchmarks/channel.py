"""How long a message takes from the driver to the last rank, and how long the driver is held by it.

    python -m benchmarks.channel --ranks 2 4 --sizes 1024 65536

The ranks are processes on this machine that wait for the next message and do nothing else; messages are paced
as decode steps are. Compared: this package's channel over gloo, vLLM's shared-memory MessageQueue, torch's
broadcast_object_list, and plain TCP with pickle. Prints a Markdown table: medians and 99th percentiles in
microseconds, and the CPU time of one rank per message (waiting by spinning shows there).
"""

import argparse
import contextlib
import json
import os
import pickle
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from spmd_serve.channel.base import ChannelSpec
from spmd_serve.channel.gloo import open_inbox, open_outbox

WARM_UP = 20
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Round:
    """One line of the table."""

    transport: str
    ranks: int
    size: int
    messages: int
    interval_s: float
    spin_s: float
    depth: int
    frame_bytes: int
    store_port: int

    def store(self) -> Any:
        client = TCPStore(
            "127.0.0.1", self.store_port, is_master=False, timeout=timedelta(seconds=DEADLINE_S)
        )
        return PrefixStore(repr(self), client)

    def spec(self) -> ChannelSpec:
        members = ("driver", *(f"rank {rank}" for rank in range(self.ranks)))
        return ChannelSpec("control", members, "benchmark", depth=self.depth, frame_bytes=self.frame_bytes)


Send = Callable[[Any], object]
Receive = Callable[[], Any]


class Gloo:
    def driver(self, round: Round) -> Send:
        return open_outbox(round.store(), round.spec(), interface="lo").enqueue

    def rank(self, round: Round, rank: int) -> Receive:
        inbox = open_inbox(round.store(), round.spec(), rank + 1, interface="lo", spin_s=round.spin_s)
        return lambda: inbox.dequeue(indefinite=True)


class Ring:
    def driver(self, round: Round) -> Send:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        queue = MessageQueue(round.ranks, round.ranks)
        round.store().set("handle", pickle.dumps(queue.export_handle()))
        queue.wait_until_ready()
        send: Send = queue.enqueue
        return send

    def rank(self, round: Round, rank: int) -> Receive:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        queue = MessageQueue.create_from_handle(pickle.loads(round.store().get("handle")), rank)
        queue.wait_until_ready()
        return lambda: queue.dequeue(indefinite=True)


class ObjectList:
    def driver(self, round: Round) -> Send:
        dist = self._group(round, 0)
        return lambda obj: dist.broadcast_object_list([obj], src=0)

    def rank(self, round: Round, rank: int) -> Receive:
        dist = self._group(round, rank + 1)

        def receive() -> Any:
            box = [None]
            dist.broadcast_object_list(box, src=0)
            return box[0]

        return receive

    def _group(self, round: Round, member: int) -> Any:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=round.store(), rank=member, world_size=round.ranks + 1)
        return dist


class Tcp:
    def driver(self, round: Round) -> Send:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            round.store().set("port", str(listener.getsockname()[1]))
            socks = [listener.accept()[0] for _ in range(round.ranks)]
        for sock in socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(obj: Any) -> None:
            payload = pickle.dumps(obj, 5)
            whole = struct.pack("<Q", len(payload)) + payload
            for sock in socks:
                sock.sendall(whole)

        return send

    def rank(self, round: Round, rank: int) -> Receive:
        sock = socket.create_connection(("127.0.0.1", int(round.store().get("port"))))

        def exactly(length: int) -> bytearray:
            whole = bytearray(length)
            view = memoryview(whole)
            while view:
                view = view[sock.recv_into(view) :]
            return whole

        return lambda: pickle.loads(exactly(struct.unpack("<Q", exactly(8))[0]))


TRANSPORTS: dict[str, Any] = {
    "gloo": Gloo,
    "gloo, spinning": Gloo,
    "MessageQueue": Ring,
    "broadcast_object_list": ObjectList,
    "TCP": Tcp,
}


def run_driver(round: Round) -> list[float]:
    """Seconds that each send held the driver."""
    store = round.store()
    send = TRANSPORTS[round.transport]().driver(round)
    for rank in range(round.ranks):
        store.get(f"ready/{rank}")
    held = []
    filler = bytes(round.size)
    for _ in range(WARM_UP + round.messages):
        time.sleep(round.interval_s)
        start = time.monotonic_ns()
        send((start, filler))
        held.append((time.monotonic_ns() - start) / 1e9)
    for rank in range(round.ranks):
        store.get(f"done/{rank}")
    return held[WARM_UP:]


def run_rank(round: Round, rank: int) -> list[float]:
    """Seconds from send to receipt of each message, and at last the CPU seconds used for all of them."""
    store = round.store()
    receive = TRANSPORTS[round.transport]().rank(round, rank)
    store.set(f"ready/{rank}", "1")
    latencies: list[float] = []
    used = 0.0
    for number in range(WARM_UP + round.messages):
        if number == WARM_UP:
            used = time.process_time()
        sent, _ = receive()
        latencies.append((time.monotonic_ns() - sent) / 1e9)
    used = time.process_time() - used
    store.set(f"done/{rank}", "1")
    for other in range(round.ranks):  # who leaves early takes its connections away
        store.get(f"done/{other}")
    return [*latencies[WARM_UP:], used]


@contextlib.contextmanager
def processes() -> Iterator[Callable[[Callable[[], Any]], int]]:
    """Yields a function that forks and runs; it returns a file descriptor to read the JSON result from."""
    pids: list[int] = []

    def start(function: Callable[[], Any]) -> int:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            try:
                result = json.dumps(function())
                with os.fdopen(write, "w") as file:
                    file.write(result)
            finally:
                os._exit(0)
        os.close(write)
        pids.append(pid)
        return read

    try:
        yield start
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def measure(round: Round) -> str:
    """One row of the table."""
    with processes() as start:
        driver = start(lambda: run_driver(round))
        ranks = [start(lambda rank=rank: run_rank(round, rank)) for rank in range(round.ranks)]  # type: ignore[misc]
        held: list[float] = json.load(os.fdopen(driver))
        answers: list[list[float]] = [json.load(os.fdopen(rank)) for rank in ranks]
    last = [max(latencies) for latencies in zip(*(answer[:-1] for answer in answers), strict=True)]
    cpu = statistics.mean(answer[-1] for answer in answers) / round.messages
    cells = [round.transport, round.ranks, f"{round.size / 1024:g} KiB"]
    for values in (last, held):
        cells += [
            f"{1e6 * statistics.median(values):.0f}",
            f"{1e6 * sorted(values)[len(values) * 99 // 100]:.0f}",
        ]
    return f"| {' | '.join(map(str, cells))} | {1e6 * cpu:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="receiving processes")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 16384, 65536, 1 << 20], help="bytes")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--messages", type=int, default=200, help="in each round, after 20 to warm up")
    parser.add_argument("--interval-ms", type=float, default=5.0, help="pause before each message")
    parser.add_argument("--spin-ms", type=float, default=10.0, help='of "gloo, spinning"')
    parser.add_argument("--depth", type=int, default=4, help="receives posted ahead (gloo)")
    parser.add_argument("--frame-bytes", type=int, default=16 * 1024, help="size of a frame (gloo)")
    args = parser.parse_args()
    if "MessageQueue" in args.transports:
        import vllm.distributed.device_communicators.shm_broadcast  # noqa: F401  imported once, before the forks
    with processes() as start, socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            fd = listener.detach()
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
            time.sleep(24 * 3600)
            del store

        start(serve)
        heads = ("transport", "ranks", "message", "to the last rank, µs", "p99", "driver held, µs", "p99")
        print(f"| {' | '.join(heads)} | CPU of a rank, µs |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for ranks in args.ranks:
            for size in args.sizes:
                for transport in args.transports:
                    spin_s = args.spin_ms / 1000 if "spinning" in transport else 0.0
                    round = Round(
                        transport,
                        ranks,
                        size,
                        args.messages,
                        args.interval_ms / 1000,
                        spin_s,
                        args.depth,
                        args.frame_bytes,
                        port,
                    )
                    print(measure(round), flush=True)


if __name__ == "__main__":
    main()
