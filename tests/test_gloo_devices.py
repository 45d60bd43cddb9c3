"""A rank's gloo groups share a device, so that an idle rank sleeps."""

import subprocess
import sys

from tests.support.ports import free_port

PROGRAM = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from spmd_serve.engine.gloo_devices import share_gloo_device

share_gloo_device()
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 1, True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
groups = [dist.new_group([0], backend="gloo") for _ in range(8)]
groups.append(dist.ProcessGroupGloo(dist.PrefixStore("own", store), 0, 1, timedelta(seconds=5)))
for group in groups[:-1]:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [1, 1, 1]
assert groups[-1].options._timeout == timedelta(seconds=5)
assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(names.count("gloo_tcp_loop"))
dist.destroy_process_group()
"""


def test_one_loop_thread_serves_all_groups() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(free_port())],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
