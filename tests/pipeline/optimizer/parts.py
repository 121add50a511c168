"""Small models, steps and optimizers, and all a user can see after a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions, Stats

WIDTH = 8
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def chain(count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


@contextmanager
def attached(model: nn.Module, seed: int = 0, **options: Any) -> Iterator[Pipeline]:
    """Each linear layer is a unit; copies and work on the host take a random time, free memory is poisoned."""
    backend = HostBackend(poison=True, max_delay=0.004, seed=seed)
    choices = PipelineOptions(**{"k": 2, "units": nn.Linear, "debug": True, **options})
    with Pipeline(model, "cpu", options=choices, backend=backend) as pipeline:
        yield pipeline


def check_story(
    story: Callable[[nn.Module, Pipeline | None], list[Any]], make: Callable[[], nn.Module] = chain, **options: Any
) -> Stats:
    """What a story shows is the same with a pipeline as without; returns the counters."""
    expected = story(make(), None)
    with attached(model := make(), **options) as pipeline:
        assert same(expected, story(model, pipeline))
        return pipeline.stats


def plain_step(model: nn.Module, optimizer: Optimizer) -> None:
    """A step as in any tutorial; nothing is read."""
    optimizer.zero_grad()
    model(X).square().mean().backward()
    optimizer.step()


def stepped_early(pipeline: Pipeline, model: nn.Module, optimizer: Optimizer) -> None:
    """Units have taken a step whose `step()` has not come yet."""
    plain_step(model, optimizer)
    optimizer.zero_grad()
    loss = model(X).square().mean()
    with pipeline.optimizers.stepping_in_backward(optimizer):
        loss.backward()
    assert pipeline.stats.steps_in_backward == 5


def everything(model: nn.Module, *optimizers: Optimizer) -> list[Any]:
    """All a user can see after a step, which has consumed the gradients."""
    seen: list[Any] = [p.detach().clone() for p in model.parameters()]
    for optimizer in optimizers:
        states = copy.deepcopy(optimizer.state_dict())["state"]
        seen += list(states)  # in their order
        seen += [states[number][key] for number in states for key in sorted(states[number])]
    return seen


def same(expected: list[Any], found: list[Any]) -> bool:
    assert len(expected) == len(found)
    return all(as_numbers(a) == as_numbers(b) for a, b in zip(expected, found, strict=True))


def as_numbers(value: Any) -> Any:
    """Something that `==` compares as a whole; state of LBFGS has lists of tensors."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.tolist()
    return [as_numbers(item) for item in value] if isinstance(value, list | tuple) else value


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def by_kind(model: nn.Module) -> Optimizer:
    """Biases without weight decay, as everyone does."""
    decayed, others = (
        [p for name, p in model.named_parameters() if name.endswith(kind)] for kind in ("weight", "bias")
    )
    return AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0, "lr": 0.1}])


def autocast_step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(X).square().mean()
    loss.backward()
    optimizer.step()


class Own(SGD):
    """A user's optimizer; nobody knows what it does."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                assert len(group["params"]) == 10
                total = sum(p.grad.sum() for p in group["params"])
                for p in group["params"]:
                    p.sub_(p.grad * group["lr"] + total * 0.001)
