"""The host runs ahead of the device: nothing is written to what a copy to the device still has to read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from sp_lightning.pipeline import HostBackend, Pipeline, PipelineOptions
from sp_lightning.pipeline.lanes.lanes import Ticket
from sp_lightning.pipeline.units.unit import Residency

X = torch.linspace(-1, 1, 16).view(2, 8)


class LateCopy(Ticket):
    """A copy that, for all that the host knows, has only been made once the host has waited for it."""

    def __init__(self, copied: Ticket, target: Tensor, source: Tensor) -> None:
        self.copied = copied
        self.target = target
        self.source = source
        self.read: Tensor | None = None
        self._is_done = False

    @override
    def join(self) -> None:
        self.copied.join()
        self.check()
        self._is_done = True

    @property
    @override
    def done(self) -> bool:
        return self._is_done

    def forgive(self) -> None:
        self._is_done = True

    def check(self) -> None:
        if self.read is not None and not torch.equal(self.read, self.source):
            # asked afterwards: a thread that has waited for the copy may write to it meanwhile
            assert self._is_done, "written to before it was copied"


class LaggingBackend(HostBackend):
    """A device that has not begun with what it was given. What computing does not wait for is nobody's concern."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self.copies: list[LateCopy] = []

    @override
    def upload(self, target: Tensor, source: Tensor, after: Ticket | None = None) -> Ticket:
        self.copies.append(LateCopy(super().upload(target, source, after), target, source))
        return self.copies[-1]

    @override
    def wait(self, ticket: Ticket) -> None:
        if isinstance(ticket, LateCopy):
            ticket.copied.join()
            ticket.read = ticket.target.clone() if ticket.read is None else ticket.read
        else:
            super().wait(ticket)

    @override
    def drain(self) -> None:
        super().drain()
        for late in self.copies:
            late.forgive()


@contextmanager
def lagging(model: nn.Module, k: int = 2) -> Iterator[Pipeline]:
    options = PipelineOptions(k=k, units=nn.Linear)
    with Pipeline(model, "cpu", options=options, backend=LaggingBackend()) as pipeline:
        yield pipeline
        for unit in pipeline.arrangement.in_window:
            for late in unit.presence.uploads if unit.presence.residency is Residency.READABLE else ():
                assert isinstance(late, LateCopy)
                late.check()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "load": lambda model: model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()}),
    "in place": torch.no_grad()(lambda model: [weight.mul_(1.5) for weight in model.parameters()]),
    "foreach": torch.no_grad()(lambda model: torch._foreach_mul_(list(model.parameters()), 1.5)),
    "data": lambda model: [weight.data.mul_(1.5) for weight in model.parameters()],
    "other memory": lambda model: [setattr(weight, "data", 1.5 * weight.data) for weight in model.parameters()],
    "alias": lambda model: [weight.detach().mul_(1.5) for weight in model.parameters()],
}


@pytest.mark.parametrize("lowered", [False, True], ids=["as they are", "lowered"])
@pytest.mark.parametrize("in_step", [False, True], ids=["between steps", "in a step"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_after_a_forward_come_after_its_copies(
    edit: Callable[[nn.Module], object], in_step: bool, lowered: bool
) -> None:
    """A `load_state_dict` after a forward without a graph changed what queued copies were still to read."""

    def outputs(model: nn.Module, pipeline: Pipeline | None) -> list[Tensor]:
        found = []
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered, cache_enabled=False):
            model(X).float().sum().backward()  # shows what is lowered
            for _ in range(3):
                with torch.no_grad(), pipeline.step() if pipeline is not None and in_step else nullcontext():
                    found.append(model(X))
                    edit(model)
        return found

    model = make_model()
    expected = outputs(copy.deepcopy(model), None)
    with lagging(model) as pipeline:
        got = outputs(model, pipeline)
        assert all(map(torch.equal, got, expected))


class Plain(torch.optim.Optimizer):
    """An optimizer that the engine does not know: it steps as in plain training."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for weight in [weight for weight in group["params"] if weight.grad is not None]:
                weight.add_(weight.grad, alpha=-0.1)


@pytest.mark.parametrize("lowered", [False, True], ids=["as they are", "lowered"])
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.AdamW(p), lambda p: Plain(p, {}), lambda p: torch.optim.LBFGS(p, max_iter=2)]
)
def test_a_step_comes_after_the_copies_of_a_forward_before_it(
    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer], lowered: bool
) -> None:
    """A forward between backward and step sends weights again, and the step did not wait for that."""

    def train(model: nn.Module) -> list[Tensor]:
        optimizer, seen = make(model.parameters()), []
        for _ in range(4):

            def closure() -> float:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=lowered, cache_enabled=False):
                    loss = model(X).float().square().sum()
                    loss.backward()
                    with torch.no_grad():
                        seen.append(model(X).float())
                return float(loss.detach())

            optimizer.step(closure)
        return seen

    model = make_model()
    expected = train(copy.deepcopy(model))
    with lagging(model) as pipeline:
        got = train(model)
        assert pipeline.stats.optimizer_steps == 4
        assert all(map(torch.equal, got, expected))
