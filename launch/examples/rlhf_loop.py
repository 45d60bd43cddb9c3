"""Generate, train, generate: the loop of RLHF frameworks, with trainer and engine in the same ranks.

    torchrun --nproc-per-node 2 launch/examples/rlhf_loop.py MODEL --steps 2

Every rank holds the policy (a transformers model) beside its shard of the engine. A step: the engine samples
answers; they get a reward (here: the share of vowels); the ranks train the policy on the better half, each on
its part, and sum their gradients over the script's own process group; then every shard takes the policy's new
weights (`collective_rpc` of a worker extension). At the end the engine must answer as the policy does.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from spmd_serve import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "Once upon a time", "The future of AI is"]


class TakeWeights:
    """Becomes a part of vLLM's worker on every rank; runs in the rank's process, so it sees the policy."""

    model_runner: Any

    def take_weights(self) -> None:
        """vLLM takes from the policy's tensors what belongs to this rank's shard."""
        self.model_runner.reload_weights(weights_iterator=iter(policy.state_dict().items()))


def reward(text: str) -> float:
    return sum(letter in "aeiouAEIOU" for letter in text) / max(len(text), 1)


def train(samples: list[list[int]], rate: float) -> float:
    """One step of gradient descent on the samples' likelihood, each rank on its part; the mean loss."""
    policy.zero_grad()
    total = torch.zeros((), device=device)
    for number in range(rank, len(samples), world):
        ids = torch.tensor([samples[number]], device=device)
        loss = policy(input_ids=ids, labels=ids).loss / len(samples)
        loss.backward()
        total += loss.detach()
    for parameter in policy.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        with torch.no_grad():
            parameter -= rate * parameter.grad
    dist.all_reduce(total)
    return float(total)


def greedy_of_policy(prompt: list[int], count: int) -> list[int]:
    """What the trained policy itself answers."""
    ids = torch.tensor([prompt], device=device)
    with torch.no_grad():
        for _ in range(count):
            best = policy(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return list(map(int, ids[0, len(prompt) :]))


parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("model")
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--rate", type=float, default=0.05)
parser.add_argument("--max-model-len", type=int, default=1024)
parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
parser.add_argument("--enforce-eager", action="store_true", help="starts faster, runs slower")
args = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()  # the script's own: the engine builds its groups inside it
rank, world = dist.get_rank(), dist.get_world_size()
policy: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)

llm = LLM(
    args.model,
    dtype="float32",  # so that engine and policy can be compared token by token
    worker_extension_cls=TakeWeights,
    max_model_len=args.max_model_len,
    gpu_memory_utilization=args.gpu_memory_utilization,
    enforce_eager=args.enforce_eager,
)
sampled = SamplingParams(n=4, temperature=1.0, max_tokens=24, seed=1)
greedy = SamplingParams(temperature=0.0, max_tokens=24)
before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]

for step in range(args.steps):
    outputs = llm.generate(PROMPTS, sampled, use_tqdm=False)
    scored = [
        (reward(answer.text), [*output.prompt_token_ids, *answer.token_ids])
        for output in outputs
        for answer in output.outputs
    ]
    scored.sort(key=lambda pair: pair[0], reverse=True)
    loss = train([ids for _, ids in scored[: len(scored) // 2]], args.rate)
    llm.collective_rpc("take_weights")
    llm.reset_prefix_cache()  # what is cached there came from the old weights
    if rank == 0:
        mean = sum(score for score, _ in scored) / len(scored)
        print(f"step {step}: mean reward {mean:.3f}, loss {loss:.3f}", flush=True)

after = llm.generate(PROMPTS, greedy, use_tqdm=False)
expected = [greedy_of_policy(output.prompt_token_ids, 24) for output in after]
answers = [list(output.outputs[0].token_ids) for output in after]
assert answers == expected, "the engine does not answer as the policy does"
assert answers != list(map(list, before)), "training has changed nothing"
if rank == 0:
    print("new weights are at work: the engine answers as the trained policy does", flush=True)
