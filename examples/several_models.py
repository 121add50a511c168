"""Train several models by turns that do not fit the device together: a sweep over learning rates, in a plain loop.

Each model has a pipeline of its own, with a window on the device. A step that clips gradients by their norm waits for
all of them. While the host then steps one model, the device computes the next one (arXiv 2110.08633). The losses of
each are those of training it alone, to the last bit.

    python examples/several_models.py                                      # three tiny models, by turns and alone
    python examples/several_models.py --order turns --lr 1e-5 3e-5 1e-4 --model gpt2 --text my.txt
    python examples/several_models.py --strategy auto                      # without streaming, for comparison
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count

import recipe
import torch
from finetune_lm import MODEL_OPTIONS, CausalLM, TextData, add_model_and_text, check_sizes
from torch import Tensor, nn

import sp_lightning

MAX_NORM = 1.0  # of all gradients of a model


def train(options: argparse.Namespace, lr: float, at_once: int) -> Iterator[Tensor]:
    """Train a model, one of so many at once, and yield the loss of each step, which is taken when it is asked for."""
    torch.manual_seed(options.seed)
    with recipe.one_line():
        module = CausalLM(**{name: getattr(options, name) for name in MODEL_OPTIONS if name != "lr"}, lr=lr)
        data = TextData(options.text, options.model, options.batch_size, options.length, options.stride)
        data.setup("fit")
    batches = (batch for _ in count() for (batch,) in data.train_dataloader())
    model, optimizer, device = module.model, module.configure_optimizers(), options.device
    if options.strategy == "auto":
        model.to(device)
        step, clip, end = nullcontext, nn.utils.clip_grad_norm_, nullcontext
    else:
        # or the first one to plan its window would take most of the device
        budget = options.memory_budget or (None if device.type == "cpu" else 0.9 / at_once)
        window = {"k": options.k, "k_prime": options.k_prime, "activations": options.activations}
        pipeline = sp_lightning.superpipeline(model, device, memory_budget=budget, **window)
        step, clip, end = pipeline.step, pipeline.optimizers.clipping.clip_grad_norm, pipeline.detach
    for number in range(options.steps):
        torch.manual_seed(options.seed + number)  # or random numbers would depend on whose turn it was before
        tokens = next(batches).to(device)
        with step(), torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16-mixed"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        clip(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
    end()


def by_turns(options: argparse.Namespace) -> list[list[float]]:
    """Train the models together, one step of each after the other; return the losses of each."""
    runs = [train(options, lr, len(options.lr)) for lr in options.lr]
    rounds = list(zip(*runs, strict=True))
    return [list(map(float, losses)) for losses in zip(*rounds, strict=True)]


def alone(options: argparse.Namespace) -> list[list[float]]:
    """Train one model after the other; return the losses of each."""
    return [list(map(float, train(options, lr, 1))) for lr in options.lr]


ORDERS = {"turns": [by_turns], "alone": [alone], "both": [by_turns, alone]}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and report invalid options before any work begins."""
    parser = recipe.command_line(__doc__)
    recipe.add_training(parser, steps=20, batch_size=1, lr=[3e-4, 1e-3, 3e-3])
    add_model_and_text(parser)
    parser.set_defaults(layers=6, hidden=384, length=32)  # so few tokens that the optimizer takes as long as computing
    parser.add_argument("--order", choices=ORDERS, default="both", help="of training (default: %(default)s)")
    options = recipe.parse(parser, arguments)
    check_sizes(parser, options)
    if options.devices > 1 or options.precision not in ("32-true", "bf16-mixed"):
        parser.error("this plain loop is for one device, and for --precision 32-true or bf16-mixed")
    found = None if options.accelerator == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    if found is None and options.accelerator == "gpu":
        parser.error("--accelerator gpu: there is none")
    options.device = found or torch.device("cpu")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the models in each order, and print how long it took and how the losses fell."""
    options = parse(arguments)
    if options.order == "both":  # what comes once in a process does not count for the first order
        alone(argparse.Namespace(**vars(options) | {"lr": options.lr[:1], "steps": 1}))
    found = []
    for order in ORDERS[options.order]:
        start = time.perf_counter()
        found.append(order(options))
        seconds = time.perf_counter() - start
        print(f"{order.__name__}: {len(options.lr)} models, {options.steps} steps each, in {seconds:.1f} s")
    for lr, losses in zip(options.lr, found[0], strict=True):
        print(f"Learning rate {lr:g}: first loss {losses[0]:.4f}, last {losses[-1]:.4f}")
    if len(found) > 1:
        print(f"Losses are the same in both orders: {found[0] == found[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
