"""Stock vLLM serves the tiny models, and what it generates is fit for comparisons."""

from pathlib import Path

import pytest

from harness.models import Shape, make_model
from tests.support.stock import MAX_TOKENS, PROMPTS, Reference

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_greedy_text_depends_on_the_prompt_and_varies_by_step(tiny_qwen3: Path, reference: Reference) -> None:
    answers = reference.greedy(tiny_qwen3)
    assert len({answer.text for answer in answers}) == len(PROMPTS)
    for answer in answers:
        assert len(answer.tokens) == MAX_TOKENS  # no special token won
        assert len(set(answer.tokens)) > MAX_TOKENS // 3
        assert answer.text.isascii() and answer.text.isprintable()


def test_an_adapter_changes_every_answer(tiny_qwen3: Path, tiny_lora: Path, reference: Reference) -> None:
    plain = reference.greedy(tiny_qwen3)
    adapted = reference.greedy(tiny_qwen3, lora=tiny_lora)
    assert all(one.tokens != two.tokens for one, two in zip(plain, adapted, strict=True))


@pytest.mark.by_hand
@pytest.mark.parametrize("shape", ["llama", "qwen3_moe"])
def test_the_other_shapes_load_too(shape: Shape, tmp_path: Path, reference: Reference) -> None:
    answers = reference.greedy(make_model(shape, tmp_path))
    assert len({answer.text for answer in answers}) == len(PROMPTS)
