"""A training loop under Lightning Fabric: a causal language model whose weights need not fit in GPU memory.

    sp-lightning fabric-loop                                       # a tiny model learns Python's manual
    sp-lightning fabric-loop --model gpt2 --text my.txt --precision bf16-mixed --save gpt2.ckpt
    sp-lightning fabric-loop --strategy auto                       # without streaming, for comparison

The loop accumulates gradients, clips them by their norm, and evaluates. Only the strategy comes from this package.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import count

import recipe
import torch
from finetune_lm import MODEL_OPTIONS, CausalLM, TextData, add_model_and_text, check_sizes
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
from training import begin

from sp_lightning.fabric import SuperpipelineStrategy

ACCUMULATE = 2  # batches in a step
MAX_NORM = 1.0  # of all gradients


def train(fabric: Fabric, options: argparse.Namespace) -> list[float]:
    """Train a model, and return the loss of each step."""
    fabric.seed_everything(options.seed, verbose=False)
    with recipe.one_line(options.model):
        module = CausalLM(**{name: getattr(options, name) for name in MODEL_OPTIONS})
        data = TextData(options.text, options.model, options.batch_size, options.length, options.stride)
        data.setup("fit")
    model, optimizer = fabric.setup(module.model, module.configure_optimizers())
    loader: DataLoader[tuple[torch.Tensor, ...]] = fabric.setup_dataloaders(data.train_dataloader())
    batches = (tokens for _ in count() for (tokens,) in loader)
    losses = []
    for _ in range(options.steps):
        loss = 0.0
        for number in range(1, ACCUMULATE + 1):
            tokens = next(batches)
            with fabric.no_backward_sync(model, enabled=number < ACCUMULATE):
                part = model(input_ids=tokens, labels=tokens, use_cache=False).loss / ACCUMULATE
                fabric.backward(part)
            loss += part.item()
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    model.eval()
    with torch.no_grad():
        last = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    fabric.print(f"Loss of the last batch, once more: {last.item():.4f}")
    if options.save is not None:
        fabric.save(options.save, {"model": model, "optimizer": optimizer, "steps": options.steps})
    return losses


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=40, batch_size=4, lr=3e-3)
    add_model_and_text(parser)
    parser.add_argument(
        "--save", type=recipe.new_file, metavar="FILE", help="write the model and its optimizer when training is over"
    )
    options = recipe.parse(parser, arguments, data="text")
    check_sizes(parser, options)
    if options.strategy != "auto":
        options.strategy = SuperpipelineStrategy(**recipe.streaming(options))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print how the loss fell and what was moved."""
    options = parse(arguments)
    begin(options)
    fabric = Fabric(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=options.strategy,
        precision=options.precision,
    )
    fabric.launch()
    start = time.perf_counter()
    losses = train(fabric, options)
    seconds = time.perf_counter() - start
    fabric.print(f"Loss: first {losses[0]:.4f}, last {losses[-1]:.4f} ({len(losses)} steps in {seconds:.1f} s)")
    if options.save is not None:
        fabric.print(f"Checkpoint in {options.save}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
