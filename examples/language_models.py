"""Language models for the recipes: tiny ones with random weights, and those of the Hugging Face hub."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


def new_model(layers: int, hidden: int, heads: int, experts: int) -> PreTrainedModel:
    """Return a model with random weights: like Llama, or like Qwen's mixtures of experts."""
    tokenizer = make_tokenizer(None)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        # transformers' default is meant for larger models; a small one learns slowly with it
        "initializer_range": hidden**-0.5,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if experts:
        sizes |= {"num_experts": experts, "num_experts_per_tok": min(2, experts), "moe_intermediate_size": hidden}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, head_dim=hidden // heads))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def load(model: str, dtype: torch.dtype, four_bit: bool) -> PreTrainedModel:
    """Return a hub model on the CPU, with 4-bit linear layers of bitsandbytes if asked for."""
    if not four_bit:
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, quantization_config=bits, device_map="cpu")
    for layer in loaded.modules():
        layer.support_avx512bf16_for_cpu = False  # or validation on a CPU would round its scales to bf16, for good
    return loaded


def make_tokenizer(model: str | None) -> PreTrainedTokenizerBase:
    """Return a hub model's tokenizer, or a byte-level one that needs no files. Both pad on the left, for prompts."""
    if model is None:
        return ByT5Tokenizer(extra_ids=0, padding_side="left")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
