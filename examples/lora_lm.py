"""Fine-tune a causal language model by adapters: a frozen base, and thin matrices beside its layers that learn (LoRA).

Frozen weights have no gradients and no optimizer state: in host memory each takes what it is stored in, 2 bytes with
`--dtype bfloat16`, where full fine-tuning takes 16, and only the adapters' gradients come back from the device.

    python examples/lora_lm.py                                          # tiny and random, below a minute on a laptop
    python examples/lora_lm.py --model Qwen/Qwen2.5-14B --dtype bfloat16 --text my.txt
    python examples/lora_lm.py --peft                                   # the adapters of `pip install peft`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import recipe
import torch
from finetune_lm import MODEL_OPTIONS, CausalLM, TextData, add_model_and_text, check_sizes
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen linear layer, and two thin matrices beside it whose product learns what to change.

    Args:
        base: The layer.
        rank: Columns of the first matrix, and rows of the second.
        alpha: The product counts `alpha / rank` times.

    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # so that at first nothing is changed
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer says, and what the adapter adds to it."""
        change = self.up(self.down(x.to(self.down.weight.dtype)))  # fp32, also beside a base in bf16
        return self.base(x) + (change * self.scale).to(x.dtype)


def add_adapters(model: nn.Module, head: nn.Module, rank: int, alpha: float) -> None:
    """Freeze a model, and put an adapter beside each of its linear layers but the head."""
    model.requires_grad_(False)
    layers = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layers to adapt: try peft, which knows other kinds")
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(layer, rank, alpha))


class LoRALM(CausalLM):
    """A causal language model whose adapters learn.

    Args:
        model: Name of a hub model. `None` builds a Llama-style one with random weights from the three sizes.
        layers: Blocks of the random model.
        hidden: Width of the random model.
        heads: Attention heads of the random model; they divide `hidden`.
        lr: Learning rate of AdamW.
        dtype: What the base is stored in: `"float32"` or `"bfloat16"`. Adapters are in fp32.
        generation: Arguments of transformers' `generate` for prediction.
        weights: A checkpoint of `finetune_lm.py`, of the same sizes, for the base.
        rank: Of the adapters.
        alpha: Adapters count `alpha / rank` times.
        peft: Take the adapters of the `peft` package in place of those above.

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
        self.strict_loading = False  # a checkpoint has the adapters alone

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the adapters."""
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(learning, lr=self.hparams["lr"], fused=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen base out of the checkpoint."""
        learning = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name in learning}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what cannot work is said here, before any work."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=60, batch_size=8, lr=1e-2)
    add_model_and_text(parser)
    adapters = parser.add_argument_group("adapters")
    adapters.add_argument("--rank", type=recipe.positive, default=8, help="(default: %(default)s)")
    adapters.add_argument("--alpha", type=float, default=16, help="strength times rank (default: %(default)s)")
    adapters.add_argument("--peft", action="store_true", help="take those of the peft package")
    adapters.add_argument("--save", metavar="FILE", help="write the adapters when training is over")
    options = recipe.parse(parser, arguments)
    check_sizes(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the adapters, then say how the loss fell and what was streamed."""
    options = parse(arguments)
    losses = recipe.Losses()
    trainer = recipe.trainer(options, [losses], max_steps=options.steps)
    model = LoRALM(**{name: getattr(options, name) for name in [*MODEL_OPTIONS, "rank", "alpha", "peft"]})
    learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    recipe.say(f"{learning} of {sum(parameter.numel() for parameter in model.parameters())} parameters learn")
    trainer.fit(model, TextData(options.text, options.model, options.batch_size, options.length, options.stride))
    if options.save is not None:
        trainer.save_checkpoint(options.save)
    recipe.say(losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
