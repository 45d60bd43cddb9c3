"""Offline data parallel inference under torchrun, in two ways.

    torchrun --nproc-per-node 4 launch/examples/torchrun_dp_example.py MODEL --tp-size 2 --dp-size 2

First as vLLM's own example does it: the script gives each replica its own prompts, and gets their answers.
That is what `distributed_executor_backend="external_launcher"` means here. Without it, every rank passes all
prompts: they are spread over the replicas, and all answers come back in order (`--spread`).
"""

import argparse

from spmd_serve import LLM, SamplingParams


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true", help="starts faster, runs slower")
    parser.add_argument("--spread", action="store_true", help="let spmd_serve spread the prompts")
    return parser.parse_args()


args = parse_args()

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model=args.model,
    tensor_parallel_size=args.tp_size,
    pipeline_parallel_size=args.pp_size,
    data_parallel_size=args.dp_size,
    distributed_executor_backend=None if args.spread else "external_launcher",
    max_model_len=args.max_model_len,
    max_num_seqs=args.max_num_seqs,
    enforce_eager=args.enforce_eager,
    seed=args.seed,
)

dp_rank = llm.llm_engine.vllm_config.parallel_config.data_parallel_rank
dp_size = llm.llm_engine.vllm_config.parallel_config.data_parallel_size

if not args.spread:
    prompts = [f"{number}.{prompt}" for number, prompt in enumerate(prompts) if number % dp_size == dp_rank]

outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"DP Rank: {dp_rank} Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}\n")
