"""Offline inference under torchrun: the script runs on every rank, and every rank gets all answers.

    torchrun --nproc-per-node 2 launch/examples/torchrun_example.py MODEL

This is vLLM's own torchrun example with another import; `distributed_executor_backend` may stay, or go.
"""

import argparse

import torch.distributed as dist

from spmd_serve import LLM, SamplingParams


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--enforce-eager", action="store_true", help="starts faster, runs slower")
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
    distributed_executor_backend="external_launcher",
    max_model_len=args.max_model_len,
    enforce_eager=args.enforce_eager,
    seed=1,
)

outputs = llm.generate(prompts, sampling_params)

# All ranks have the same outputs, so one of them prints.
if dist.get_rank() == 0:
    print("-" * 50)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
        print("-" * 50)

# Between calls:
# - torch.distributed's default group is the script's: dist.all_reduce(...), dist.broadcast(...).
# - llm.llm_engine.model_executor.driver_worker.worker.model_runner.model is this rank's part of the model.
# - llm.collective_rpc("method") on every rank runs a worker's method on every shard (see rlhf_loop.py).
