"""Tiny models made on the spot: random weights from a fixed seed, no model hub.

`python -m harness.models qwen3 OUTDIR` writes one by hand. Needs torch, safetensors and tokenizers
only, so it takes two seconds. The weights are scaled so that greedy text depends on the whole prompt, rarely
hangs on a near tie (the best token leads by more than 1 nat, median), is printable ASCII, and never ends by
itself: `max_tokens` decides the length.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Shape = Literal["qwen3", "llama", "qwen3_moe"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Chosen by measurement: with them a greedy run of 48 tokens has some 30 different ones.
LOGIT_STD = 5.0  # nats; the best of the 95 printable tokens then leads by 1.4 nats (median)
BRANCH_GAIN = 1.0  # what attention and MLP add to the residual stream, against an embedding of size 1
QUERY_KEY_GAIN = 1.6  # how sharply attention picks single positions


@dataclass(frozen=True)
class Size:
    """The dimensions of a tiny model: TP sizes up to 8 and PP sizes up to 4 divide them."""

    layers: int = 4
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 256
    experts: int = 8
    experts_per_token: int = 2
    expert_intermediate: int = 128
    positions: int = 32768
    vocabulary: int = 264  # 256 bytes, the special tokens, and a few ids that no text uses


def make_model(shape: Shape, out: Path, *, seed: int = 0, size: Size | None = None) -> Path:
    """Writes a model folder that vLLM and transformers load; the same seed gives the same bytes."""
    size = size or Size()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(size))
    _write_json(out / "config.json", _config(shape, size))
    _write_json(out / "generation_config.json", {"eos_token_id": tokenizer.token_to_id(TURN_END)})
    weights = _weights(shape, size, tokenizer, torch.Generator().manual_seed(seed))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def make_lora(out: Path, *, seed: int = 1, rank: int = 8, size: Size | None = None) -> Path:
    """Writes a LoRA adapter in PEFT's format for any of the shapes, strong enough to change greedy text."""
    size = size or Size()
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    widths = {"q_proj": size.heads * size.head_dim, "v_proj": size.kv_heads * size.head_dim}
    weights: dict[str, torch.Tensor] = {}
    for layer in range(size.layers):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = _normal(
                generator, rank, size.hidden, std=1 / math.sqrt(size.hidden)
            )
            weights[f"{prefix}.lora_B.weight"] = _normal(generator, width, rank, std=1 / math.sqrt(rank))
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
        "inference_mode": True,
    }
    _write_json(out / "adapter_config.json", config)
    return out


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then the special tokens: no merges, so every text has one encoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _tokenizer_config(size: Size) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": size.positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _config(shape: Shape, size: Size) -> dict[str, object]:
    tokenizer = byte_tokenizer()
    config: dict[str, object] = {
        "model_type": shape,
        "architectures": [
            {"qwen3": "Qwen3", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}[shape] + "ForCausalLM"
        ],
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "torch_dtype": "float32",
    }
    if shape == "llama":
        config["mlp_bias"] = False
    if shape == "qwen3_moe":
        config |= {
            "num_experts": size.experts,
            "num_experts_per_tok": size.experts_per_token,
            "moe_intermediate_size": size.expert_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _weights(
    shape: Shape, size: Size, tokenizer: Tokenizer, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    weights = {
        "model.embed_tokens.weight": _normal(generator, size.vocabulary, size.hidden, std=1.0),
        "model.norm.weight": torch.ones(size.hidden),
        "lm_head.weight": _head(size, tokenizer, generator),
    }
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}": value for name, value in _attention(shape, size, generator).items()}
        weights |= {f"{prefix}.{name}": value for name, value in _mlp(shape, size, generator).items()}
    return weights


def _head(size: Size, tokenizer: Tokenizer, generator: torch.Generator) -> torch.Tensor:
    """Only printable ASCII can win: all other rows, special tokens among them, give the logit 0."""
    head = _normal(generator, size.vocabulary, size.hidden, std=LOGIT_STD / math.sqrt(size.hidden))
    printable = {tokenizer.encode(chr(code), add_special_tokens=False).ids[0] for code in range(0x20, 0x7F)}
    silent = [token for token in range(size.vocabulary) if token not in printable]
    head[silent] = 0.0
    return head


def _attention(shape: Shape, size: Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
    inner, std = size.heads * size.head_dim, 1 / math.sqrt(size.hidden)
    key_width = size.kv_heads * size.head_dim
    normed = (
        shape != "llama"
    )  # Qwen3 normalises queries and keys, so there the norm's weight carries the gain
    gain = 1.0 if normed else QUERY_KEY_GAIN
    tensors = {
        "input_layernorm.weight": torch.ones(size.hidden),
        "self_attn.q_proj.weight": _normal(generator, inner, size.hidden, std=std * gain),
        "self_attn.k_proj.weight": _normal(generator, key_width, size.hidden, std=std * gain),
        "self_attn.v_proj.weight": _normal(generator, key_width, size.hidden, std=std),
        "self_attn.o_proj.weight": _normal(generator, size.hidden, inner, std=BRANCH_GAIN / math.sqrt(inner)),
    }
    if normed:
        tensors["self_attn.q_norm.weight"] = torch.full((size.head_dim,), QUERY_KEY_GAIN)
        tensors["self_attn.k_norm.weight"] = torch.full((size.head_dim,), QUERY_KEY_GAIN)
    return tensors


def _mlp(shape: Shape, size: Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tensors = {"post_attention_layernorm.weight": torch.ones(size.hidden)}
    if shape != "qwen3_moe":
        return tensors | _gated(size.hidden, size.intermediate, "mlp", generator)
    tensors["mlp.gate.weight"] = _normal(generator, size.experts, size.hidden, std=1 / math.sqrt(size.hidden))
    for expert in range(size.experts):
        tensors |= _gated(size.hidden, size.expert_intermediate, f"mlp.experts.{expert}", generator)
    return tensors


def _gated(hidden: int, width: int, prefix: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    # silu(x)·y of two unit normals has a standard deviation of about 0.6, hence the division.
    return {
        f"{prefix}.gate_proj.weight": _normal(generator, width, hidden, std=1 / math.sqrt(hidden)),
        f"{prefix}.up_proj.weight": _normal(generator, width, hidden, std=1 / math.sqrt(hidden)),
        f"{prefix}.down_proj.weight": _normal(
            generator, hidden, width, std=BRANCH_GAIN / 0.6 / math.sqrt(width)
        ),
    }


def _normal(generator: torch.Generator, *shape: int, std: float) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * std


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("shape", choices=[*SHAPES, "lora"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.shape == "lora":
        make_lora(arguments.out, seed=arguments.seed)
    else:
        make_model(arguments.shape, arguments.out, seed=arguments.seed)
    print(arguments.out)


if __name__ == "__main__":
    main()
