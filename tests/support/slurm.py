"""A Slurm cluster over simulated hosts: munged, slurmctld on the first host, one slurmd on each.

Needs root and Debian's packages munge, slurmctld, slurmd and slurm-client. Configuration, keys, state and
sockets live in a folder of the test; a configured Slurm of the machine is not touched.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.server import Server
from harness.waiting import wait_until
from tests.support.netns import Hosts

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel")
START_S = 30.0
CALL_S = 30.0

_CONFIG = """\
ClusterName=test
SlurmctldHost={head}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no Slurm here, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    needs = "apt-get install munge slurmctld slurmd slurm-client"
    return f"Slurm needs {', '.join(missing)} ({needs})" if missing else None


class Slurm:
    """`with Slurm(hosts, folder) as slurm:` has a node for each host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        """`folder`: with a short path, as sockets are in there."""
        self._hosts, self._folder = hosts, folder
        self._ends = ExitStack()
        self._head = hosts.names[0]

    def __enter__(self) -> Self:
        folder, hosts = self._folder, self._hosts
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={hosts.address(name)} CPUs=1 State=UNKNOWN" for name in hosts.names
        )
        config = _CONFIG.format(
            head=self._head, address=hosts.address(self._head), folder=folder, nodes=nodes
        )
        (folder / "slurm.conf").write_text(config)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        munge = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in ("pid-file", "log-file")]
        munge += [f"--seed-file={folder}/munge.seed", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        try:
            self._start("munged", ["munged", "--foreground", "--force", *munge])
            wait_until((folder / "munge.socket").exists, START_S, "munged's socket")
            self._start("slurmctld", hosts.command(self._head, ["slurmctld", "-D"]))
            for name in hosts.names:
                self._start(f"slurmd.{name}", hosts.command(name, ["slurmd", "-D", "-N", name]))
            states = ["idle"] * len(hosts.names)
            wait_until(lambda: self.call("sinfo", "-hNo", "%t").split() == states, START_S, "idle nodes")
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.call("scancel", "--user=root")
            wait_until(lambda: not self.running(), START_S, "the end of all jobs")
        finally:
            self._ends.close()

    def _start(self, name: str, command: list[str]) -> None:
        server = Server(command, self._folder / f"{name}.log", environ=self._environ())
        self._ends.callback(server.end)
        server.start()

    def _environ(self, **more: str) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf"), **more}

    def call(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """What a command on the first host prints."""
        done = subprocess.run(
            self._hosts.command(self._head, command),
            env=self._environ()
            if environ is None
            else {**environ, "SLURM_CONF": self._environ()["SLURM_CONF"]},
            capture_output=True,
            text=True,
            timeout=CALL_S,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def running(self) -> list[str]:
        """The numbers of jobs that have not ended."""
        return self.call("squeue", "-ho", "%i").split()
