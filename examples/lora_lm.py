"""Fine-tune a causal language model with LoRA: the base is frozen, and thin matrices beside its layers are trained.

Frozen weights have no gradients and no optimizer state. In CPU memory, each of them takes only its stored size:
2 bytes with `--dtype bfloat16`, where full fine-tuning takes 16. Only the gradients of adapters are copied back.

    sp-lightning lora-lm                                          # a tiny random model, on any machine
    sp-lightning lora-lm --model Qwen/Qwen2.5-14B --dtype bfloat16 --text my.txt
    sp-lightning lora-lm --peft                                   # with adapters of peft (`pip install peft`)

`--save` writes a Lightning checkpoint of the adapters, `--save-adapters` a folder that peft and others load.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import recipe
import torch
from finetune_lm import (
    MODEL_OPTIONS,
    CausalLM,
    add_model_and_text,
    add_optimizer,
    check_optimizer,
    check_sizes,
    train_on_text,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from training import begin, save_checkpoint
from transformers import PreTrainedModel

LORA_OPTIONS = [*MODEL_OPTIONS, "rank", "alpha", "peft", "optimizer"]


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter: two thin matrices whose product is a learned update of the weight.

    Args:
        base: The layer to adapt.
        rank: Rank of the update.
        alpha: The update is scaled by `alpha / rank`.

    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # the adapter changes nothing at first
        self.scale = alpha / rank
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layer's and the adapter's output, or the layer's alone."""
        output = self.base(x)
        if not self.is_on:
            return output
        change = self.up(self.down(x.to(self.down.weight.dtype)))  # in fp32, even if the base is in bf16
        return output + (change * self.scale).to(output.dtype)


def add_adapters(model: nn.Module, head: nn.Module, rank: int, alpha: float) -> None:
    """Freeze a model, and add an adapter to each of its linear layers, 4-bit ones too, except the head.

    Experts and their router stay as they are, as in most recipes for mixtures of experts: all tokens pass attention.
    """
    model.requires_grad_(False)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not is_of_experts(model, name)
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layers to adapt: try peft, which knows other kinds")
    for name, layer in layers.items():
        model.set_submodule(name, Adapted(layer, rank, alpha))


def is_of_experts(model: nn.Module, name: str) -> bool:
    """Tell whether a module is one of several experts, or decides among them."""
    parents = name.split(".")
    outer = [model.get_submodule(".".join(parents[:depth])) for depth in range(len(parents))]
    return any(hasattr(module, "experts") for module in outer)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute what it did before it got adapters."""
    adapters = [module for module in model.modules() if isinstance(module, Adapted)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the update of each adapter to its layer's weight, and put the layer in its place again."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Adapted):
            update = module.up.weight.float() @ module.down.weight.float() * module.scale
            module.base.weight.copy_(module.base.weight.float() + update)
            model.set_submodule(name, module.base)


def adapter_weights(model: nn.Module, prefix: str, *, is_scaled: bool) -> dict[str, Tensor]:
    """Return the weights of a model's adapters by the names of peft, with their scale in them if that is asked for."""
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            up = module.up.weight.detach() * (module.scale if is_scaled else 1)
            weights[f"{prefix}{name}.lora_A.weight"] = module.down.weight.detach().cpu().contiguous().clone()
            weights[f"{prefix}{name}.lora_B.weight"] = up.cpu().contiguous()
    return weights


def save_adapters(model: PreTrainedModel, folder: str, base: str | None, rank: int, alpha: float) -> None:
    """Write adapters for peft's `PeftModel.from_pretrained`, and whatever else reads such a folder."""
    weights = adapter_weights(model, "base_model.model.", is_scaled=False)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in weights}),
        "inference_mode": True,
    }
    save_file(weights, Path(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
    Path(folder, "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def quantize(model: nn.Module) -> None:
    """Replace the linear layers of a model, which stays frozen, by those of bitsandbytes with 4-bit weights (NF4)."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            bits = Linear4bit(
                layer.in_features,
                layer.out_features,
                layer.bias is not None,
                compute_dtype=layer.weight.dtype,
                quant_type="nf4",
                device="meta",
            )
            weight = layer.weight.detach()
            bits.weight = Params4bit(weight, requires_grad=False, quant_type="nf4", module=bits).to("cpu")
            bits.bias = layer.bias
            bits.support_avx512bf16_for_cpu = False  # or validation on a CPU would round its scales to bf16, for good
            model.set_submodule(name, bits)


class LoRALM(CausalLM):
    """A causal language model of which only the adapters are trained.

    Args:
        model: Name of a hub model. `None` builds a Llama-style one with random weights from the three sizes.
        layers: Number of blocks in the random model.
        hidden: Hidden size of the random model.
        heads: Number of attention heads in the random model; must divide `hidden`.
        lr: Learning rate of AdamW. `None` takes what suits the size of a pretrained model.
        dtype: Storage dtype of the base: `"float32"` or `"bfloat16"`. Adapters are in fp32.
        generation: Arguments for transformers' `generate` in prediction.
        weights: A checkpoint of `finetune_lm.py`, with the same sizes, for the base.
        rank: Rank of the adapters.
        alpha: The adapters' output is scaled by `alpha / rank`.
        peft: Use the adapters of the `peft` package instead of those above.
        optimizer: One of `finetune_lm.OPTIMIZERS`.
        experts: Number of experts in each block of the random model, two of which compute a token. 0 has none.

    """

    def __init__(
        self,
        model: str | None = None,
        layers: int = 12,
        hidden: int = 128,
        heads: int = 4,
        lr: float | None = 1e-2,
        dtype: str = "float32",
        generation: dict[str, Any] | None = None,
        weights: str | None = None,
        rank: int = 8,
        alpha: float = 16,
        peft: bool = False,
        optimizer: str = "adamw",
        experts: int = 0,
    ) -> None:
        super().__init__(model, layers, hidden, heads, lr, dtype, generation, weights, optimizer, experts=experts)
        if peft:
            from peft import LoraConfig, inject_adapter_in_model

            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
            inject_adapter_in_model(config, self.model)
        else:
            add_adapters(self.model, self.model.get_output_embeddings(), rank, alpha)


def add_rank(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options for the adapters' size, and return their group."""
    adapters = parser.add_argument_group("adapters")
    adapters.add_argument("--rank", type=recipe.positive, default=8, help="rank of the adapters (default: %(default)s)")
    adapters.add_argument("--alpha", type=recipe.amount, default=16, help="scale times rank (default: %(default)s)")
    adapters.add_argument(
        "--save-adapters", type=recipe.new_folder, metavar="FOLDER", help="write the adapters for peft, or diffusers"
    )
    return adapters


def check_adapters(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Report that there are no adapters to write."""
    if options.save_adapters and options.train == "full":
        parser.error("--save-adapters has none to write: add --train lora")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=60, batch_size=8, lr=1e-2, lr_by_size=True)
    recipe.add_long_run(parser, "runs/lora_lm")
    add_model_and_text(parser)
    add_optimizer(parser)
    adapters = add_rank(parser)
    adapters.add_argument("--peft", action="store_true", help="use the adapters of the peft package")
    adapters.add_argument(
        "--save", type=recipe.new_file, metavar="FILE", help="write the adapters when training is over"
    )
    options = recipe.parse(parser, arguments, data="text", best=("val_loss", "min"), always_validates=False)
    check_sizes(parser, options)
    check_optimizer(parser, options)
    if options.save_adapters and options.peft:
        parser.error("--save-adapters is for the adapters of this recipe: leave out --peft")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the adapters, then print how the loss fell and what was streamed."""
    options = parse(arguments)
    begin(options)
    with recipe.one_line(options.model):
        model = LoRALM(**{name: getattr(options, name) for name in LORA_OPTIONS})
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    recipe.say(f"{trainable} of {sum(parameter.numel() for parameter in model.parameters())} parameters are trained")

    def save(trainer: L.Trainer) -> None:
        save_checkpoint(options, trainer)
        if options.save_adapters is not None and trainer.is_global_zero:
            save_adapters(model.model, options.save_adapters, options.model, options.rank, options.alpha)

    train_on_text(options, model, save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
