"""Fine-tune a causal language model with LoRA: the base is frozen, and thin matrices beside its layers are trained.

Frozen weights have no gradients and no optimizer state. In host memory, each of them takes only its stored size:
2 bytes with `--dtype bfloat16`, where full fine-tuning takes 16. Only gradients of adapters come back from the device.

    python examples/lora_lm.py                                          # a tiny random model, on any machine
    python examples/lora_lm.py --model Qwen/Qwen2.5-14B --dtype bfloat16 --text my.txt
    python examples/lora_lm.py --peft                                   # with adapters of peft (`pip install peft`)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import recipe
import torch
from finetune_lm import MODEL_OPTIONS, CausalLM, TextData, add_model_and_text, check_sizes
from torch import Tensor, nn


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
    """Freeze a model, and add an adapter to each of its linear layers, 4-bit ones too, except the head."""
    model.requires_grad_(False)
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layers to adapt: try peft, which knows other kinds")
    for name, layer in layers.items():
        model.set_submodule(name, Adapted(layer, rank, alpha))


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


class LoRALM(CausalLM):
    """A causal language model of which only the adapters are trained.

    Args:
        model: Name of a hub model. `None` builds a Llama-style one with random weights from the three sizes.
        layers: Number of blocks in the random model.
        hidden: Hidden size of the random model.
        heads: Number of attention heads in the random model; must divide `hidden`.
        lr: Learning rate of AdamW.
        dtype: Storage dtype of the base: `"float32"` or `"bfloat16"`. Adapters are in fp32.
        generation: Arguments for transformers' `generate` in prediction.
        weights: A checkpoint of `finetune_lm.py`, with the same sizes, for the base.
        rank: Rank of the adapters.
        alpha: The adapters' output is scaled by `alpha / rank`.
        peft: Use the adapters of the `peft` package instead of those above.

    """

    def __init__(
        self,
        model: str | None = None,
        layers: int = 12,
        hidden: int = 128,
        heads: int = 4,
        lr: float = 1e-2,
        dtype: str = "float32",
        generation: dict[str, Any] | None = None,
        weights: str | None = None,
        rank: int = 8,
        alpha: float = 16,
        peft: bool = False,
    ) -> None:
        super().__init__(model, layers, hidden, heads, lr, dtype, generation, weights)
        if peft:
            from peft import LoraConfig, inject_adapter_in_model

            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
            inject_adapter_in_model(config, self.model)
        else:
            add_adapters(self.model, self.model.get_output_embeddings(), rank, alpha)
        self.strict_loading = False  # a checkpoint contains only the adapters

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the adapters."""
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.hparams["lr"], fused=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen base out of the checkpoint."""
        recipe.leave_out_frozen(self, checkpoint)


def add_rank(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options for the adapters' size, and return their group."""
    adapters = parser.add_argument_group("adapters")
    adapters.add_argument("--rank", type=recipe.positive, default=8, help="(default: %(default)s)")
    adapters.add_argument("--alpha", type=recipe.amount, default=16, help="strength times rank (default: %(default)s)")
    return adapters


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=60, batch_size=8, lr=1e-2)
    add_model_and_text(parser)
    adapters = add_rank(parser)
    adapters.add_argument("--peft", action="store_true", help="use the adapters of the peft package")
    adapters.add_argument(
        "--save", type=recipe.new_file, metavar="FILE", help="write the adapters when training is over"
    )
    options = recipe.parse(parser, arguments)
    check_sizes(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the adapters, then print how the loss fell and what was streamed."""
    options = parse(arguments)
    L.seed_everything(options.seed, verbose=False)
    losses = recipe.Losses()
    trainer = L.Trainer(
        strategy=options.strategy,  # `SuperpipelineStrategy()`, unless the command line says otherwise
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps,
        callbacks=[losses, *options.callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    with recipe.one_line():
        model = LoRALM(**{name: getattr(options, name) for name in [*MODEL_OPTIONS, "rank", "alpha", "peft"]})
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    recipe.say(f"{trainable} of {sum(parameter.numel() for parameter in model.parameters())} parameters are trained")
    recipe.fit(
        trainer, model, TextData(options.text, options.model, options.batch_size, options.length, options.stride)
    )
    if options.save is not None:
        trainer.save_checkpoint(options.save)
    recipe.say(losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
