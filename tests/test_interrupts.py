"""An interrupt at any line of the package: the module is a plain one afterwards, and can be trained as any other."""

from __future__ import annotations

import copy
import linecache
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_lightning
from sp_lightning import optim, superpipeline
from sp_lightning.pipeline.lanes.at_work import optimizer_steps

from .helpers import ram_is_full
from .lightning_modules import Base, loader, streamed, trainer
from .selection import parts
from .zoo.blocks import WIDTH, chain


def train(model: nn.Module, activations: str | None) -> list[Tensor]:
    """Two steps, streamed with this policy for activations, or plainly."""
    with nullcontext() if activations is None else superpipeline(model, "cpu", k=2, activations=activations):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((2, WIDTH), 1.0 + step)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_on_drive(model: nn.Module) -> list[Tensor]:
    """Two steps with optimizer state on a drive."""
    with ram_is_full(), superpipeline(model, "cpu", k=2, nvme_path="."):
        optimizer = optim.AdamW(model.parameters(), lr=0.01, moments="int8")
        for step in range(2):
            optimizer.zero_grad()
            model(torch.full((2, WIDTH), 1.0 + step)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def fit(module: nn.Module) -> None:
    trainer(streamed(), max_steps=2, num_sanity_val_steps=0, gradient_clip_val=0.01).fit(module, loader())


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "keep": (partial(chain, 2), partial(train, activations="keep")),
    "recompute": (partial(chain, 2), partial(train, activations="recompute")),
    "drive": (partial(chain, 2), train_on_drive),
    "Trainer": (Base, fit),
}


LEAD_TO_THE_END = {"__exit__", "detach", "_detach", "teardown"}
"""Functions in which an interrupt may come before the pipeline has heard that it is to give the module back."""


def run(program: Callable[[], Any], interrupted_at: int = sys.maxsize) -> int:
    """Run a program, and interrupt it at this line in the package; return how many lines have run there."""
    lines = 0

    def at_each_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            code = frame.f_code
            # Python lets no interrupt come between a scope's begin or end and the next line.
            is_scope = linecache.getline(code.co_filename, frame.f_lineno).lstrip().startswith("with ")
            if lines >= interrupted_at and not is_scope and code.co_name not in LEAD_TO_THE_END:
                sys.settrace(None)
                raise KeyboardInterrupt
        return at_each_line

    def of_package(frame: FrameType, event: str, _: Any) -> Any:
        return at_each_line if frame.f_code.co_filename.startswith(sp_lightning.__path__[0]) else None

    sys.settrace(of_package)
    with suppress(KeyboardInterrupt, SystemExit):  # the latter is Lightning's
        try:
            program()
        finally:
            sys.settrace(None)
    return lines


@pytest.mark.parametrize("part", parts(12))
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_at_a_random_line(name: str, part: int) -> None:
    """Nothing of the pipeline is left, and the next run is as plain training."""
    make, program = PROGRAMS[name]
    chance = random.Random(part)
    most = run(partial(program, make()))
    for _ in range(6):
        model = make()
        run(partial(program, model), interrupted_at := chance.randrange(most))
        message = f"line {interrupted_at} of {most}"
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}, message
        assert all(type(module) is module.__class__ for module in model.modules()), message
        assert torch._C._is_torch_function_enabled(), message
        assert optimizer_steps.depth == 0, message
        assert torch.is_grad_enabled(), message
        plain = chain(2)
        plain.load_state_dict(model.state_dict() if name != "Trainer" else plain.state_dict())
        again = copy.deepcopy(plain)
        assert all(map(torch.equal, train(again, "keep"), train(plain, None))), message
