"""Pretrain a language model in two phases: all layers share the weights of one, and later each has its own.

In the first phase (arXiv 2110.03888) the model takes the memory of one layer, on the host as well: weights, gradients
and optimizer state exist once. Then each layer gets a copy of the weights, and they stream. The LightningModule is that
of finetune_lm.py; what is new is a callback, which works under any strategy.

    python examples/pseudo_to_real.py                                         # a tiny random model, on any machine
    python examples/pseudo_to_real.py --layers 48 --hidden 2048 --heads 16 --text my.txt --steps 90000 --delink 30000
    python examples/pseudo_to_real.py --model Qwen/Qwen2.5-1.5B --text my.txt # all layers begin as its first one

The phases can also be runs of their own: `--steps 30 --delink 30 --save shared.ckpt` is the first one, and
`finetune_lm.py --weights shared.ckpt` the second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
import recipe
from finetune_lm import MODEL_OPTIONS, CausalLM, TextData, add_model_and_text, check_sizes
from torch import nn


class Delink(L.Callback):
    """Has all layers share the weights of the first one, and gives each its own copy of them after some steps.

    The optimizer's state of these weights begins anew. That of a shared weight describes the sum of the gradients of
    all layers, many times what each of them gets from then on, so that copies of it would make steps too small.

    Args:
        steps: Optimizer steps with shared weights.

    """

    def __init__(self, steps: int = 30) -> None:
        self.steps = steps
        self.shares = True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Share the weights, before an optimizer is made of them."""
        if not self.shares:  # a run after the one that has trained the model
            return
        self.first, *self.others = layers_of(pl_module)
        for layer in self.others:
            layer.load_state_dict(self.first.state_dict(keep_vars=True), assign=True)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """When it is time, give each layer its own weights, and the optimizer those of all."""
        if not self.shares or trainer.global_step < self.steps:
            return
        self.shares = False
        recipe.say(f"{1 + len(self.others)} layers share weights: {recipe.memory(trainer)}")
        for layer in self.others:
            weights = {name: value.clone() for name, value in self.first.state_dict().items()}
            layer.load_state_dict(weights, assign=True)
        (optimizer,) = trainer.optimizers
        for parameter in self.first.parameters():
            optimizer.state.pop(parameter, None)  # of several processes, one has it
        optimizer.param_groups[0]["params"] = list(pl_module.parameters())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what the last phase takes."""
        recipe.say(f"In the end: {recipe.memory(trainer)}")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to tell."""
        return {"shares": self.shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint of the second phase, whose layers have been read into one."""
        if not state["shares"]:
            raise ValueError("in this checkpoint each layer has its own weights: go on without Delink")


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, if they are alike."""
    layers = next((list(each) for each in module.modules() if isinstance(each, nn.ModuleList)), [])
    shapes = [{name: parameter.shape for name, parameter in layer.named_parameters()} for layer in layers]
    if len(layers) < 2 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{type(module).__name__} has no list of layers that are alike, to share weights")
    return layers


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=60, batch_size=8, lr=1e-3)
    add_model_and_text(parser)
    parser.add_argument(
        "--delink", type=recipe.positive, default=30, help="steps with shared weights (default: %(default)s)"
    )
    parser.add_argument("--save", type=recipe.new_file, metavar="FILE", help="write a checkpoint when training is over")
    options = recipe.parse(parser, arguments)
    check_sizes(parser, options)
    if options.delink > options.steps:
        parser.error(f"--delink {options.delink} comes after the last of --steps {options.steps}")
    if options.strategy == "auto" and options.devices > 1:
        parser.error("--strategy auto is DDP on several devices, which does not notice that there are new weights")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in two phases, then print how the loss fell, and what each of them took."""
    options = parse(arguments)
    L.seed_everything(options.seed, verbose=False)
    with recipe.one_line():
        model = CausalLM(**{name: getattr(options, name) for name in MODEL_OPTIONS})
        layers_of(model.model)
    losses = recipe.Losses()
    trainer = L.Trainer(
        strategy=options.strategy,  # `SuperpipelineStrategy()`, unless the command line says otherwise
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps,
        callbacks=[losses, Delink(options.delink), *options.callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    recipe.fit(
        trainer, model, TextData(options.text, options.model, options.batch_size, options.length, options.stride)
    )
    if options.save is not None:
        trainer.save_checkpoint(options.save)
    recipe.say(losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
