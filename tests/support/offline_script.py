"""A user's script, started by torchrun on every rank: `-m tests.support.offline_script WHAT OUT MODEL …`.

Each function below is one script; what it finds goes to OUT/rank<RANK>.json, for the test to look at.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from harness.models import make_model
from spmd_serve import LLM, SamplingParams
from tests.support.stock import MAX_TOKENS, PROMPTS

RANK = int(os.environ.get("RANK", "0"))
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "call_timeout": 30.0,
}
STOCK = {name: value for name, value in SMALL.items() if name != "call_timeout"}
LORA = {"enable_lora": True, "max_lora_rank": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
SHORT = SamplingParams(temperature=0.0, max_tokens=8)

Found = dict[str, Any]

TRAINED: dict[str, torch.Tensor] = {}
"""Where the script puts new weights for the shard, which is in the same process."""


class Extension:
    """What a training framework adds to vLLM's worker: methods that every shard runs."""

    rank: int
    model_runner: Any

    def my_rank(self) -> int:
        return self.rank

    def head(self) -> list[int]:
        return list(self.model_runner.model.lm_head.weight.shape)

    def take_weights(self) -> int:
        self.model_runner.reload_weights(weights_iterator=iter(TRAINED.items()))
        return len(TRAINED)

    def sum_of(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    def fail_on(self, rank: int) -> str:
        if self.rank == rank:
            raise ValueError(f"rank {rank} fails")
        return "fine"


EXTENSION = f"{__name__}.{Extension.__name__}"


def tokens(outputs: Any) -> Any:
    """Token ids of each answer; None stays None."""
    return None if outputs is None else [list(output.outputs[0].token_ids) for output in outputs]


def error_of(call: Callable[[], object]) -> str:
    """What a call raises, as text."""
    try:
        call()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def answers(llm: Any, lora: str) -> Found:
    """All kinds of calls, with answers that stock vLLM must give as well."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    found: Found = {}
    found["greedy"] = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=RANK == 0))
    found["again"] = tokens(llm.generate(list(PROMPTS), GREEDY, use_tqdm=False))
    adapter = LoRARequest("adapter", 1, lora)
    found["lora"] = tokens(llm.generate(PROMPTS, GREEDY, lora_request=adapter, use_tqdm=False))
    sampling = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=8, logprobs=2)
    several = llm.generate(PROMPTS[0], sampling, use_tqdm=False)[0]
    found["several"] = [list(one.token_ids) for one in several.outputs]
    found["logprobs"] = [sorted(place) for place in several.outputs[0].logprobs]
    found["prompt"] = several.prompt
    messages = [{"role": "user", "content": "Tell me about France."}]
    found["chat"] = llm.chat(messages, SHORT, use_tqdm=False)[0].outputs[0].text
    beams = llm.beam_search([{"prompt": PROMPTS[1]}], BeamSearchParams(beam_width=2, max_tokens=4))
    found["beams"] = [sequence.tokens for sequence in beams[0].sequences]
    choice = SamplingParams(
        temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["red", "blue"])
    )
    found["choice"] = llm.generate(PROMPTS[2], choice, use_tqdm=False)[0].outputs[0].text
    ids = llm.enqueue([{"prompt_token_ids": [72, 105]}, PROMPTS[3]], SHORT, use_tqdm=False)
    found["queued"] = len(ids)
    found["completed"] = tokens(llm.wait_for_completion(use_tqdm=False))
    found["too long"] = error_of(lambda: llm.generate(["a" * 2000], SHORT, use_tqdm=False))
    found["wrong kind"] = error_of(lambda: llm.embed(["a"], use_tqdm=False))
    found["tokenizer"] = llm.get_tokenizer().encode("Hi")
    found["cache"] = llm.reset_prefix_cache()
    llm.sleep(0)
    llm.wake_up(tags=["scheduling"])
    found["sleeping"] = llm.llm_engine.is_sleeping()
    found["weight version"] = llm.get_weight_version()
    found["default"] = llm.get_default_sampling_params().max_tokens
    return found


def stock(out: Path, model: str, lora: str) -> Found:
    """The same calls, answered by vLLM's own LLM on one rank, in this process."""
    import vllm

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = vllm.LLM(model, **LORA, worker_extension_cls=EXTENSION, **STOCK)
    found = {"answers": answers(llm, lora)}
    TRAINED.update(load_file(make_model("qwen3", out / "trained", seed=5) / "model.safetensors"))
    llm.collective_rpc("take_weights")
    llm.reset_prefix_cache()
    return {**found, "trained": tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))}


def tensor_parallel(out: Path, model: str, lora: str) -> Found:
    """Two ranks, a process group of the script's own, and two LLMs one after the other."""
    dist.init_process_group("gloo")
    found: Found = {}
    with LLM(model, tensor_parallel_size=2, worker_extension_cls=EXTENSION, **LORA, **SMALL) as llm:
        found["answers"] = answers(llm, lora)
        found["ranks"] = llm.collective_rpc("my_rank")
        found["one fails"] = error_of(lambda: llm.collective_rpc("fail_on", args=(0,)))
        found["other fails"] = error_of(lambda: llm.collective_rpc("fail_on", args=(1,)))
        found["none fails"] = llm.collective_rpc("fail_on", args=(7,))
        found["unknown"] = error_of(lambda: llm.collective_rpc("no_such_method"))
        found["function"] = llm.collective_rpc(lambda worker, more: [worker.rank, RANK + more], args=(10,))
        found["own tensor"] = llm.collective_rpc("sum_of", args=(torch.full((2,), RANK + 1.0),))
        found["model"] = llm.apply_model(lambda model: [RANK, *model.lm_head.weight.shape])
        found["engine"] = llm.llm_engine.model_executor.collective_rpc("my_rank")
        model_of_rank = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        found["head"] = list(model_of_rank.lm_head.weight.shape)
        found["world"] = [llm.get_world_size(), llm.get_world_size(include_dp=False)]
        found["repr"] = repr(llm)
    found["closed"] = error_of(lambda: llm.generate(PROMPTS[0], SHORT))
    found["shard"] = llm.worker is None
    total = torch.tensor([RANK + 1])
    dist.all_reduce(total)
    found["own group"] = [int(total), dist.get_world_size()]

    second = LLM(model, outputs_on="driver", worker_extension_cls=Extension, **SMALL)
    found["on driver"] = tokens(second.generate(PROMPTS, GREEDY, use_tqdm=False))
    TRAINED.update(train(out))
    found["taken"] = second.collective_rpc("take_weights")
    second.reset_prefix_cache()
    found["trained"] = tokens(second.generate(PROMPTS, GREEDY, use_tqdm=False))
    found["another"] = error_of(lambda: LLM(model, **SMALL))
    found["name"] = Path("/proc/self/comm").read_text().strip()
    return found


def train(out: Path) -> dict[str, torch.Tensor]:
    """New weights: rank 0 has them, and the script's own process group brings them to the others."""
    mine = load_file(make_model("qwen3", out / "trained", seed=5) / "model.safetensors") if RANK == 0 else {}
    shapes = [{name: tuple(tensor.shape) for name, tensor in mine.items()}]
    dist.broadcast_object_list(shapes, 0)
    for name, shape in shapes[0].items():
        mine.setdefault(name, torch.empty(shape))
        dist.broadcast(mine[name], 0)
    return mine


def pipeline_parallel(out: Path, model: str, lora: str) -> Found:
    """No process group before; ours is there afterwards. The end of the script ends the LLM."""
    llm = LLM(model, pipeline_parallel_size=2, **SMALL)
    found: Found = {"greedy": tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))}
    found["twenty"] = tokens(llm.generate([f"{number} {PROMPTS[0]}" for number in range(20)], SHORT))
    total = torch.tensor([RANK + 1])
    dist.all_reduce(total)
    found["group"] = [int(total), dist.get_world_size(), dist.get_rank()]
    llm.close()
    llm.close()
    dist.all_reduce(total)
    found["later"] = int(total)
    dist.destroy_process_group()
    return found


def data_parallel(out: Path, model: str, lora: str) -> Found:
    """Two replicas: first spread by us, then as vLLM's example for its external launcher does it."""
    found: Found = {}
    llm = LLM(model, data_parallel_size=2, worker_extension_cls=Extension, **SMALL)
    found["greedy"] = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    lengths = [SamplingParams(temperature=0.0, max_tokens=number + 1) for number in range(len(PROMPTS))]
    found["lengths"] = [len(ids) for ids in tokens(llm.generate(PROMPTS, lengths, use_tqdm=False))]
    found["single"] = tokens(llm.generate(PROMPTS[1], SHORT, use_tqdm=False))
    llm.enqueue(PROMPTS[:3], SHORT, use_tqdm=False)
    llm.enqueue(PROMPTS[3:5], SHORT, use_tqdm=False)
    found["queued"] = tokens(llm.wait_for_completion(use_tqdm=False))
    found["heads"] = llm.collective_rpc("head")
    found["too long"] = error_of(lambda: llm.generate(["a", "a" * 2000], SHORT, use_tqdm=False))
    found["after"] = tokens(llm.generate(PROMPTS[:2], SHORT, use_tqdm=False))
    found["world"] = [llm.get_world_size(), llm.get_world_size(include_dp=False)]
    llm.close()

    external = {"distributed_executor_backend": "external_launcher", "seed": RANK}
    llm = LLM(model, tensor_parallel_size=1, data_parallel_size=2, **external, **SMALL)
    parallel = llm.llm_engine.vllm_config.parallel_config
    number, count = parallel.data_parallel_rank, parallel.data_parallel_size
    mine = [prompt for place, prompt in enumerate(PROMPTS) if place % count == number]
    found["own prompts"] = [number, count, tokens(llm.generate(mine, GREEDY, use_tqdm=False))]
    if RANK == 1:  # replicas need not call equally often
        found["extra"] = tokens(llm.generate(PROMPTS[0], SHORT, use_tqdm=False))
    return found


def mixture(out: Path, model: str, lora: str) -> Found:
    """Two replicas of a mixture-of-experts model, which run it together, however uneven their work is."""
    from vllm.sampling_params import BeamSearchParams

    found: Found = {}
    with LLM(model, tensor_parallel_size=1, data_parallel_size=2, **SMALL) as llm:
        found["greedy"] = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        found["single"] = tokens(llm.generate(PROMPTS[1], SHORT, use_tqdm=False))
        beams = llm.beam_search([{"prompt": PROMPTS[1]}], BeamSearchParams(beam_width=2, max_tokens=4))
        found["beams"] = len(beams[0].sequences)
        found["too long"] = error_of(lambda: llm.generate(["a", "a" * 2000], SHORT, use_tqdm=False))
    external = {"distributed_executor_backend": "external_launcher"}
    llm = LLM(model, tensor_parallel_size=1, data_parallel_size=2, **external, **SMALL)
    mine = PROMPTS[:3] if RANK == 0 else PROMPTS[3:]
    found["own prompts"] = tokens(llm.generate(mine, GREEDY, use_tqdm=False))
    return found


def alone(out: Path, model: str, lora: str) -> Found:
    """Without torchrun."""
    llm = LLM(model, **SMALL)
    return {"greedy": tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)), "repr": repr(llm)}


def embed(out: Path, model: str, lora: str) -> Found:
    """A pooling model on two ranks."""
    with LLM(model, runner="pooling", convert="embed", **SMALL) as llm:
        return pooled(llm)


def stock_embed(out: Path, model: str, lora: str) -> Found:
    """The same of vLLM's own LLM."""
    import vllm

    return pooled(vllm.LLM(model, runner="pooling", convert="embed", **STOCK))


def pooled(llm: Any) -> Found:
    outputs = llm.embed(list(PROMPTS), use_tqdm=False)
    scores = llm.score(PROMPTS[0], list(PROMPTS[1:4]), use_tqdm=False)
    return {
        "embeddings": [output.outputs.embedding for output in outputs],
        "scores": [score.outputs.score for score in scores],
        "generate": error_of(lambda: llm.generate(PROMPTS[0], SHORT)),
    }


SCRIPTS = {
    one.__name__: one
    for one in (
        stock,
        tensor_parallel,
        pipeline_parallel,
        data_parallel,
        mixture,
        alone,
        embed,
        stock_embed,
    )
}

if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    result = SCRIPTS[what](Path(folder), *rest)
    print(f"script of rank {RANK} is done", flush=True)
    (Path(folder) / f"rank{RANK}.json").write_text(json.dumps(result))
    if what.startswith("stock"):
        sys.stdout.flush()
        os._exit(0)  # the end of vLLM's own engine is not what is under test, and it can abort
