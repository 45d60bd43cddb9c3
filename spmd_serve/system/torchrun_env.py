"""What torchrun tells a rank: the only place where its variables are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spmd_serve.errors import UsageError

_NUMBERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")

# Names, and prefixes (those that end in "_"), that children of a rank must not inherit: a vLLM process that
# sees them takes itself for a worker, joins torchrun's store or binds its threads to the rank's core.
CHILD_CLEAN: tuple[str, ...] = (
    *_NUMBERS,
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_",
    "PET_",
    "OMP_",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)

# torchrun's options that take no value; every other one takes the next word.
_SWITCHES = (
    "--standalone",
    "-m",
    "--module",
    "--no-python",
    "--run-path",
    "--virtual-local-rank",
    "--use-env",
)
_AGENT_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_AGENT_FILE = "torch/distributed/run.py"
_ANCESTORS = 4  # a wrapper script may stand between the agent and the rank


@dataclass(frozen=True)
class TorchrunEnv:
    """This process's place as torchrun numbers it; `launched` is False when there is no torchrun."""

    rank: int
    local_rank: int
    group_rank: int
    world_size: int
    local_world_size: int
    group_world_size: int
    master_addr: str
    master_port: int
    run_id: str
    restart_count: int
    max_restarts: int
    agent_pid: int
    launched: bool
    agent_store: bool = True
    """True: torchrun's agent serves the store at master_addr; False: rank 0 has to serve it itself."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "TorchrunEnv":
        """Read and check torchrun's variables; UsageError names the one that is missing or wrong.

        Without torchrun this is a world of one, whose master_port 0 means "make your own store".
        """
        if not any(name in environ for name in (*_NUMBERS, "TORCHELASTIC_RUN_ID")):
            return cls(0, 0, 0, 1, 1, 1, "127.0.0.1", 0, "single", 0, 0, os.getppid(), False, False)
        numbers = {name: _number(environ, name) for name in _NUMBERS}
        for rank, size in (
            ("RANK", "WORLD_SIZE"),
            ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            ("GROUP_RANK", "GROUP_WORLD_SIZE"),
        ):
            if numbers[rank] >= numbers[size]:
                raise UsageError(
                    f"{rank}={numbers[rank]} is not below {size}={numbers[size]}: start ranks with torchrun"
                )
        even = numbers["WORLD_SIZE"] == numbers["LOCAL_WORLD_SIZE"] * numbers["GROUP_WORLD_SIZE"]
        place = numbers["RANK"] - numbers["GROUP_RANK"] * numbers["LOCAL_WORLD_SIZE"]
        if even and place != numbers["LOCAL_RANK"]:
            raise UsageError(
                f"LOCAL_RANK={numbers['LOCAL_RANK']} does not fit RANK={numbers['RANK']} and "
                f"GROUP_RANK={numbers['GROUP_RANK']} (LOCAL_RANK {place} does): start torchrun without "
                "--virtual-local-rank, and do not set LOCAL_RANK by hand"
            )
        return cls(
            rank=numbers["RANK"],
            local_rank=numbers["LOCAL_RANK"],
            group_rank=numbers["GROUP_RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_world_size=numbers["LOCAL_WORLD_SIZE"],
            group_world_size=numbers["GROUP_WORLD_SIZE"],
            master_addr=_text(environ, "MASTER_ADDR"),
            master_port=_number(environ, "MASTER_PORT"),
            run_id=environ.get("TORCHELASTIC_RUN_ID") or "none",
            restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=_number(environ, "TORCHELASTIC_MAX_RESTARTS", 0),
            agent_pid=os.getppid(),
            launched=True,
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def given_rank(environ: Mapping[str, str]) -> str | None:
    """What torchrun calls this rank, unchecked: for error lines that must come out whatever else is wrong."""
    return environ.get("RANK")


def error_file(environ: Mapping[str, str]) -> str | None:
    """Where torchrun looks for a failed rank's cause; None without torchrun."""
    return environ.get("TORCHELASTIC_ERROR_FILE")


def job_folder(environ: Mapping[str, str]) -> Path | None:
    """The agent's own folder for this job's logs, the same in all rounds; None without torchrun."""
    file = error_file(environ)
    # …/<job>/attempt_<n>/<local rank>/error.json
    return None if file is None else Path(file).parents[2]


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environ` for children of a rank, without what CHILD_CLEAN lists."""
    prefixes = tuple(name for name in CHILD_CLEAN if name.endswith("_"))
    return {
        name: value
        for name, value in environ.items()
        if name not in CHILD_CLEAN and not name.startswith(prefixes)
    }


def rendezvous_host(agent_pid: int, proc: Path = Path("/proc")) -> str | None:
    """The host of the endpoint that the user gave to torchrun, or None where it can't be known.

    torchrun does not hand its --rdzv-endpoint on to the ranks (MASTER_ADDR is the node of *its* rank 0, which
    c10d and etcd choose by sorting), so it is read from the agent's command line and environment.
    """
    agent = _agent(agent_pid, proc)
    return _endpoint_host(*agent) if agent is not None else None


def node_range(agent_pid: int, proc: Path = Path("/proc")) -> tuple[int, int] | None:
    """How many nodes torchrun may run the job on, at least and at most; None where it can't be known."""
    agent = _agent(agent_pid, proc)
    if agent is None:
        return None
    options, environ = agent
    least, colon, most = (options.get("--nnodes") or environ.get("PET_NNODES") or "1").partition(":")
    try:
        return int(least), int(most if colon else least)
    except ValueError:
        return None


def _agent(pid: int, proc: Path) -> tuple[dict[str, str], dict[str, str]] | None:
    """Options and environment of the torchrun agent at or above a process."""
    for _ in range(_ANCESTORS):
        if pid < 1:  # 1 may be the agent itself: the first process of a container
            return None
        entry = proc / str(pid)
        try:
            options = _agent_options((entry / "cmdline").read_bytes().decode(errors="replace"))
            if options is not None:
                block = (entry / "environ").read_bytes().decode(errors="replace")
                return options, dict(line.split("=", 1) for line in block.split("\0") if "=" in line)
            # "pid (name) state ppid ...": the name may hold blanks and brackets: count from the last bracket.
            pid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return None


def _agent_options(cmdline: str) -> dict[str, str] | None:
    words = cmdline.split("\0")
    agent = next((at for at, word in enumerate(words) if _is_agent(word)), None)
    if agent is None:
        return None
    options: dict[str, str] = {}
    at = agent + 1
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        name = name.replace("_", "-")
        if not equals and name not in _SWITCHES:
            at += 1
            value = words[at] if at < len(words) else ""
        options[name] = value
        at += 1
    return options


def _is_agent(word: str) -> bool:
    return os.path.basename(word) == "torchrun" or word in _AGENT_MODULES or word.endswith(_AGENT_FILE)


def _endpoint_host(options: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    if "--standalone" in options or environ.get("PET_STANDALONE") == "1":
        return "localhost"
    endpoint = options.get("--rdzv-endpoint") or environ.get("PET_RDZV_ENDPOINT")
    if endpoint:
        return split_endpoint(endpoint)
    return options.get("--master-addr") or environ.get("PET_MASTER_ADDR") or None


def split_endpoint(endpoint: str) -> str:
    """The host of "host", "host:port", "[v6]" or "[v6]:port"."""
    endpoint = endpoint.strip()
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    host, colon, port = endpoint.rpartition(":")
    return host if colon and port.isdigit() else endpoint


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise UsageError(
            f"{name} is not set, though other variables of torchrun are: start every rank with torchrun, "
            "or unset RANK, WORLD_SIZE and their like to run a single rank"
        )
    return value


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = str(default) if default is not None and not environ.get(name) else _text(environ, name)
    if not value.isascii() or not value.isdigit():
        raise UsageError(f"{name}={value!r} is not a whole number: start every rank with torchrun")
    return int(value)
