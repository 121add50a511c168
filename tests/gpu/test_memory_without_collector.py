"""Device memory after each step, in every way of training, with Python's collector off: no cycle holds any of it."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import optim
from sp_lightning.pipeline import Pipeline, PipelineOptions

from ..planning.parts import Fixed
from ..second_device import some

pytestmark = pytest.mark.gpu

BLOCKS, STEPS = 5, 20
PLACES: dict[str, tuple[Any, ...]] = {
    "streamed": (),
    "stay": (range(0, BLOCKS, 2),),
    "updated on the GPU": ((), range(BLOCKS)),
    "wait": ((), (), range(BLOCKS)),
    "updated on the GPU, and wait": ((), (1, 3), range(BLOCKS)),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "in backward": {},
    "deferred": {"defers": True},
    "clipped": {"clip": True},
    "accumulated": {"accumulate": 2},
    "clipped, accumulated": {"clip": True, "accumulate": 2},
}


class Odd(nn.Module):
    """A block with weights of 1, 64, 127 and 1600 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 127), nn.Linear(127, 64)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(25, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.up(x).relu()) + self.shift


MAKE = {"fp32": torch.optim.AdamW, "int8": partial(optim.AdamW, moments="int8")}
CASES = [
    (places, training, "int8" if number % 2 else "fp32", "offload" if number % 3 else "recompute")
    for number, (places, training) in enumerate(product(PLACES, TRAININGS))
]


@pytest.mark.parametrize(("places", "training", "optimizer", "activations"), some(CASES, 3))
def test_memory_is_constant(places: str, training: str, optimizer: str, activations: Any, device: torch.device) -> None:
    """From step to step, and nothing is left after the module was detached."""
    how = TRAININGS[training]
    before = torch.accelerator.memory_allocated(device)
    model = nn.Sequential(*[Odd() for _ in range(BLOCKS)])
    first = [(2,)] * how.get("accumulate", 1)
    planner = Fixed(*first, (2, *PLACES[places]), defers_visits=how.get("defers", False))
    options = PipelineOptions(units=[Odd], activations=activations)
    pipeline = Pipeline(model, device, options=options, planner=planner)
    stepped, clipping = MAKE[optimizer](model.parameters(), lr=1e-3), pipeline.optimizers.clipping
    taken = []
    try:
        for step in range(STEPS):
            if step == 4:
                gc.collect()
                gc.disable()
            for micro in range(how.get("accumulate", 1)):
                scope: Any = nullcontext()
                if how.get("clip"):
                    scope = clipping.measuring_norms()
                elif not how.get("accumulate") or micro == 1:
                    scope = pipeline.optimizers.stepping_in_backward(stepped)
                with torch.autocast(device.type, torch.bfloat16), pipeline.step(), scope:
                    model(torch.ones(25, 64, device=device)).float().square().mean().backward()
            if how.get("clip"):
                clipping.clip_grad_norm(model.parameters(), 0.1)
            stepped.step()
            stepped.zero_grad()
            pipeline._engine.settle()
            pipeline.backend.drain()
            taken.append(torch.accelerator.memory_allocated(device))
        pipeline.detach()
        del scope
        assert torch.accelerator.memory_allocated(device) == before
    finally:
        gc.enable()
        pipeline.detach()
    assert len(set(taken[5:])) == 1, taken
