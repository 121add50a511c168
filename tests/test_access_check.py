"""The tests' own check of steps: weights that are read where they are not, and a master among device tensors, raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_lightning.pipeline.calls.backward import RunningCall
from sp_lightning.pipeline.lanes.backend import Trace
from sp_lightning.pipeline.torch_private import in_backward
from sp_lightning.pipeline.window.window import Window

from .helpers import Run, attached, sgd
from .zoo.blocks import Chain, Stashing, StashOnContext

Use = Callable[[Tensor], object]


@contextmanager
def in_a_step() -> Iterator[tuple[Tensor, Tensor]]:
    """A weight on the device, in whose place another one may lie by now, and its master."""
    model, kept = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]), list[Tensor]()
    model[0].register_forward_hook(lambda layer, *_: kept.append(layer._parameters["weight"].data))
    with attached(model, k=1, units=nn.Linear) as pipe, pipe.step():
        model(torch.ones(1, 3))
        yield kept[0], pipe.arrangement.weights[0].current_memory


USES: list[Use] = [
    lambda w: w + torch.ones(3, 3),
    lambda w: torch.ones(1, 3) @ w.t(),
    lambda w: nn.functional.linear(torch.ones(1, 3), w),
    lambda w: torch._foreach_add([torch.ones(3, 3), w], [torch.ones(3, 3), w]),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_what_must_not_be_read_raises(use: Use, mode: Callable[[], Any]) -> None:
    """The weight is named: the emulated device would let it pass, or fill it with NaN, and a GPU would not."""
    with mode(), in_a_step() as (twin, master):
        with pytest.raises(AssertionError, match="reads weight '0.weight'.*not waited for"):
            use(twin)
        with pytest.raises(AssertionError, match="mixes the master of '0.weight'"):
            use(master)


class ReadsOnContext(Stashing):
    """Its function reads a view of the weight in backward, when the gradient has come already."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(StashOnContext.apply(x, self.weight.detach()), self.weight)


def train(k: int) -> None:
    """Weights are edited between an evaluation and a step, and units are stepped in backward, outside of any scope."""
    model = Chain(ReadsOnContext(inplace=False) for _ in range(4))
    with attached(model, k=k, units=ReadsOnContext) as pipe:
        optimizer = sgd(model)
        for step in range(2):
            with torch.no_grad():
                model(Run.rows(step))
                model.blocks[0].weight.mul_(0.5)
            loss = model(Run.rows(step)).square().mean()
            with pipe.optimizers.stepping_in_backward(optimizer):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def but_in_backward(bring: Callable[..., None]) -> Callable[..., None]:
    return lambda window, unit: None if in_backward() else bring(window, unit)


def trust(_: object) -> Callable[..., None]:
    return lambda window, unit: setattr(unit.presence, "suspect", False)


def do_nothing(_: object) -> Callable[..., None]:
    return lambda *_: None


WRONG = [
    (1, Window, "bring", but_in_backward, "reads weight 'blocks.2.weight', but unit 'blocks.2' is ABSENT"),
    (1, Window, "_evict", do_nothing, "but unit 'blocks.0' is READABLE in the place of unit 'blocks.1'"),
    (2, Trace, "wait", do_nothing, "its copy to the device was not waited for"),
    (4, Window, "_verify", trust, "with values from before its masters changed"),
    (2, RunningCall, "note_function", do_nothing, "which was stepped in this backward"),
]


@pytest.mark.parametrize(
    ("k", "part", "name", "make", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else None
)
def test_wrong_engines_are_seen(
    k: int, part: type, name: str, make: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They forget a unit in backward, whom to evict, a wait, an edit, and who reads beside autograd."""
    train(k)
    monkeypatch.setattr(part, name, make(getattr(part, name)))
    with pytest.raises(AssertionError, match=message):
        train(k)
