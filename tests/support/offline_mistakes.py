"""Scripts with a mistake in them: `-m tests.support.offline_mistakes WHAT MODEL`, on two ranks."""

import os
import sys
import time
from typing import Any

from spmd_serve import LLM, SamplingParams

RANK = int(os.environ["RANK"])
FOREVER_S = 60.0
SHORT = SamplingParams(temperature=0.0, max_tokens=4)


def order(llm: Any) -> None:
    if RANK == 0:
        llm.generate(["a"], SHORT)
    else:
        llm.sleep(1)


def arguments(llm: Any) -> None:
    llm.generate(["a"] * (RANK + 1), SHORT)


def one_calls(llm: Any) -> None:
    if RANK == 1:
        llm.generate(["a"], SHORT)
    time.sleep(FOREVER_S)


def one_ends(llm: Any) -> None:
    if RANK == 1:
        sys.exit(0)
    llm.generate(["a"], SHORT)


def raises(llm: Any) -> None:
    if RANK == 1:
        raise ValueError("in the script of rank 1")
    time.sleep(FOREVER_S)


def raises_inside(llm: Any) -> None:
    with llm:
        if RANK == 1:
            raise KeyError("inside with")
        llm.generate(["a"], SHORT)


SCRIPTS = {one.__name__: one for one in (order, arguments, one_calls, one_ends, raises, raises_inside)}

if __name__ == "__main__":
    what, model = sys.argv[1:]
    llm = LLM(
        model, dtype="float32", max_model_len=1024, max_num_seqs=8, enforce_eager=True, call_timeout=4.0
    )
    llm.generate(["a", "b"], SHORT, use_tqdm=False)
    print("started", flush=True)
    SCRIPTS[what](llm)
    llm.generate(["c"], SHORT, use_tqdm=False)
    print("is done", flush=True)
