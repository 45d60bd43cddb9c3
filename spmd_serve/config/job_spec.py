"""What a driver or a rank must know to open the control channel: one frozen, JSON-able object."""

import math
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from spmd_serve.errors import UsageError
from spmd_serve.topology import Cluster, Layout

ADDITIONAL_CONFIG_KEY = "spmd_serve"
"""Where the spec travels in vLLM's public ``additional_config`` from the API server to its engine cores."""

_LAST_RESORT = 10
"""How many times `--step-timeout` vLLM's own limit on a step is: see `leave_steps_to_the_watcher`."""


@dataclass(frozen=True)
class JobSpec:
    """The job as placed: where its store is, who its ranks are, how messages travel.

    `round_id` is the nonce of this round's handshake and part of every name.
    `heartbeat_s`: seconds between the driver's signs of life on a quiet channel.
    `step_timeout_s`: seconds after which a step that makes no progress is taken for hung.
    """

    backend: str
    lb: str
    store_host: str
    store_port: int
    round_id: str
    cluster: Cluster
    layout: Layout
    watcher: str
    key_file: str | None
    allow_classes: tuple[str, ...]
    heartbeat_s: float
    join_timeout_s: float
    step_timeout_s: float
    busy_poll: bool = True
    """Whether readers of a ring poll for a second after each message."""
    first_replica: int = 0
    """The replica that vLLM, below an endpoint with some of the replicas, takes for its first."""
    drain_s: float = 0.0
    """How long running requests may go on at an endpoint once the job is to end, seconds."""
    in_process: bool = False
    """Each driver runs in the process of its replica's first rank (scripts), not in one of its own."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary of str, int, float, list and dict."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["cluster"] = self.cluster.to_json()
        plain["layout"] = asdict(self.layout)
        plain["allow_classes"] = list(self.allow_classes)
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "JobSpec":
        """Inverse of `to_json`."""
        values = dict(plain)
        values["cluster"] = Cluster.from_json(values["cluster"])
        values["layout"] = Layout(**values["layout"])
        values["allow_classes"] = tuple(values["allow_classes"])
        return cls(**values)

    def key(self) -> bytes | None:
        """The shared secret, or None when frames are not authenticated."""
        return None if self.key_file is None else read_key(self.key_file)


def leave_steps_to_the_watcher(spec: JobSpec, environ: MutableMapping[str, str]) -> None:
    """Have vLLM's own limit on a step, 300 s, wait for our watcher, which knows the rank and what it does.

    vLLM counts from the sending, so for a step that waits behind others, too; it names no rank. A user's own
    value stays.
    """
    seconds = math.ceil(_LAST_RESORT * spec.step_timeout_s)
    environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(seconds))


def read_key(path: str) -> bytes:
    """The shared secret in a file. Raises UsageError naming the flag for one that is unreadable or empty."""
    try:
        with open(path, "rb") as file:
            key = file.read().strip()
    except OSError as problem:
        raise UsageError(f"--control-key-file {path} cannot be read: {problem.strerror}") from problem
    if not key:
        raise UsageError(
            f"--control-key-file {path} is empty: write a secret into it (head -c 32 /dev/urandom)"
        )
    return key
