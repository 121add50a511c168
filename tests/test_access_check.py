"""The tests' own check of steps: a read that was not waited for, and a master among device tensors, raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from .helpers import attached

Use = Callable[[Tensor], object]


@contextmanager
def in_a_step(debug: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
    """A weight on the device, in whose place another one may lie by now, and its master."""
    model, kept = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]), list[Tensor]()
    model[0].register_forward_hook(lambda layer, *_: kept.append(layer._parameters["weight"].data))
    with attached(model, k=1, units=nn.Linear, debug=debug) as pipe, pipe.step():
        model(torch.ones(1, 3))
        yield kept[0], pipe.arrangement.weights[0].host


USES: list[Use] = [
    lambda w: w + torch.ones(3, 3),
    lambda w: torch.ones(1, 3) @ w.t(),
    lambda w: nn.functional.linear(torch.ones(1, 3), w),
    lambda w: torch._foreach_add([torch.ones(3, 3), w], [torch.ones(3, 3), w]),
]


@pytest.mark.parametrize("use", USES)
def test_what_must_not_be_read_raises(use: Use) -> None:
    """The weight is named: the emulated device would let it pass, or fill it with NaN, and a GPU would not."""
    with in_a_step() as (twin, master):
        with pytest.raises(AssertionError, match="reads weight '0.weight'.*not waited for"):
            use(twin)
        with pytest.raises(AssertionError, match="mixes the master of '0.weight'"):
            use(master)


FINE: list[Use] = [
    lambda w: w + 1,
    lambda w: w * torch.tensor(2.0),
    lambda w: w + w,
    lambda w: w.t(),
    lambda w: w.data.clamp_(0),
    lambda w: torch.ones(3, 3).add_(w),
]


@pytest.mark.parametrize("use", FINE)
def test_ordinary_operations_pass(use: Use) -> None:
    """Masters among themselves and with scalars, writes in place (EMA), and views of either."""
    with in_a_step() as (twin, master):
        use(master)
        assert twin.t().shape == twin[0].expand(3, 3).shape


def test_a_step_is_checked_in_debug_only() -> None:
    with in_a_step(debug=False) as (twin, master):
        assert (twin + master).shape == (3, 3)
