"""What backward calls, and what computes there with weights, gradients and what lies on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from ..zoo.blocks import WIDTH, Block
from .parts import on_device

Register = Callable[["Masked"], RemovableHandle]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class Masked(nn.Module):
    """Keeps on the device what hooks on its weights need; a checkpoint uses a weight outside of units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gain = Block(), Block(), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mask", (torch.arange(WIDTH) % 2).float())
        self.register_buffer("factor", torch.tensor(0.5))

    @property
    def hooked(self) -> nn.Parameter:
        return self.first.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.second(y * self.gain), self.first(x), use_reentrant=False)


def mask(model: Masked) -> RemovableHandle:
    return model.hooked.register_hook(lambda gradient: gradient * (model.mask * model.factor).to(gradient.device))


def accumulated(model: Masked) -> RemovableHandle:
    def change(weight: nn.Parameter) -> None:
        weight.grad.mul_(model.mask.to(weight.grad.device))

    return model.hooked.register_post_accumulate_grad_hook(change)


@pytest.mark.parametrize("register", [mask, accumulated])
def test_hooks_on_weights_say_where_they_compute(register: Register, device: torch.device) -> None:
    """The gradient is on the host when they are called, and their result goes there."""
    expected = trained(device, register, streamed=False)
    actual = trained(device, register, streamed=True)
    assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("register", [None, mask])
def test_gradients_that_are_asked_for(register: Register | None, device: torch.device) -> None:
    """They stay on the device, and a checkpoint that runs again in between uses weights there."""

    def ask(loss: Tensor, model: Masked) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = trained(device, register, streamed=False, ask=ask)
    actual = trained(device, register, streamed=True, ask=ask)
    assert all(map(torch.equal, expected, actual))


def trained(
    device: torch.device,
    register: Register | None,
    streamed: bool,
    ask: Callable[[Tensor, Masked], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Gradients after two micro-steps."""
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(5, WIDTH).to(device)
    if not streamed:
        model.to(device)
    hook = register(model) if register is not None else None
    with ExitStack() as stack:
        if streamed:
            stack.enter_context(stack.enter_context(on_device(model, device)).step())
        found = [each.cpu() for each in gradients_of(model, x, ask)]
    if hook is not None:
        hook.remove()  # it holds the model, which holds it
    return found


def gradients_of(model: Masked, x: Tensor, ask: Callable[[Tensor, Masked], list[Tensor]] | None) -> list[Tensor]:
    """Of the sum of two losses, or those that are asked for."""
    if ask is not None:
        return ask(model(x).square().mean(), model)
    for part in (x, x + 1):
        model(part).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]
