"""What a model is, told from its files (or huggingface_hub's cache) without reading them whole."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

# The first pattern that matches anything is what vLLM loads; what lies beside it does not matter.
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt")
_END_BYTES = 64 * 1024

DIRECTORY = "model directory "
REVISION = "model revision"
MISSING = "missing"
NO_WEIGHTS = "without weight files"


def model_identity(model: str, revision: str | None = None) -> dict[str, str]:
    """Items that are equal where two hosts have the same model.

    A local directory: hashes of config.json and the index of weights; name, size, and a hash of the first and
    last 64 KiB, of each weight file. One file: the same of that file. Else `model` is a hub id, and the items
    tell which revision lies in this host's cache, if any does (no network is used).
    """
    path = Path(model)
    if path.is_file():
        return {f"model file {model}": _ends(path)}
    if not path.is_dir():
        if path.is_absolute() or model.startswith((".", "~")):
            return {DIRECTORY + model: MISSING}
        cached = _cached_revision(model, revision)
        return {REVISION: cached} if cached else {}
    weights = _weights(path)
    items = {DIRECTORY + model: "with weight files" if weights else NO_WEIGHTS}
    for name in ("config.json", *(index.name for index in sorted(path.glob("*.safetensors.index.json")))):
        if (path / name).is_file():
            items[f"model {name}"] = _sha256([(path / name).read_bytes()])
    items |= {f"model weights {weight.name}": _ends(weight) for weight in weights}
    return items


def _weights(folder: Path) -> list[Path]:
    for pattern in _WEIGHTS:
        found = [path for path in sorted(folder.glob(pattern)) if path.name not in _NOT_WEIGHTS]
        if found:
            return found
    return []


def _ends(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_END_BYTES)
        file.seek(max(size - _END_BYTES, 0))
        last = file.read(_END_BYTES)
    return f"{size} bytes {_sha256([first, last])}"


def _sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _cached_revision(model: str, revision: str | None) -> str | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):
        return None  # ValueError: not a name that the hub would accept
    # …/models--owner--name/snapshots/<commit>/config.json
    return os.path.basename(os.path.dirname(file)) if isinstance(file, str) else None
