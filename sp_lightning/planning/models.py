"""Models to plan for, on the meta device: well-known shapes, and everything that transformers can configure."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn


class Model(NamedTuple):
    """A model without weights.

    Attributes:
        module: The model, on the meta device.
        inputs: Inputs for a training step; None if its configuration does not say.
        title: Its name, with the size of the inputs.
    """

    module: nn.Module
    inputs: dict[str, Any] | None
    title: str


class _Shape(NamedTuple):
    config_class: str
    numbers: dict[str, int]


SHAPES = {
    "Llama-3.1-8B": _Shape(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "Qwen2.5-14B": _Shape(
        "Qwen2Config",
        {
            "vocab_size": 152064,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
    ),
    "Llama-3.1-70B": _Shape(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
}
"""Published sizes of models that are planned for by name; heads and embeddings are not tied in any of them."""


def transformers_model(name: str, batch_size: int, length: int) -> Model:
    """Build a model of transformers on the meta device.

    Args:
        name: One of `SHAPES`, a configuration file, a folder with one, or the name of a model on the hub.
        batch_size: Texts or images in a step.
        length: Tokens in each text.

    Raises:
        ValueError: If there is no such configuration, or transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise ValueError(f"{name!r} needs transformers: pip install transformers")
    import transformers  # takes seconds, and models of other libraries do not need it

    if name in SHAPES:
        config_class, numbers = SHAPES[name]
        config = getattr(transformers, config_class)(**numbers)
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name!r} is neither a class, nor one of {', '.join(SHAPES)}, nor a configuration of transformers: "
                f"{error}"
            ) from error
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    with torch.device("meta"):
        module = auto.from_config(config).float()
    if module.main_input_name == "input_ids" and not config.is_encoder_decoder:
        tokens = torch.empty(batch_size, length, dtype=torch.long, device="meta")
        # A causal model's loss and logits are part of a step, so it gets labels; its cache is not.
        inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False} if is_causal else {"input_ids": tokens}
        return Model(module, inputs, f"{name}, {batch_size} x {length} tokens")
    if module.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        size = (batch_size, config.num_channels, config.image_size, config.image_size)
        return Model(module, {"pixel_values": torch.empty(size, device="meta")}, f"{name}, {batch_size} images")
    return Model(module, None, name)
