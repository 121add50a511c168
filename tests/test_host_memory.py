"""Host memory is what the summary says, at any time: nothing waits for Python's garbage collector to be freed.

Arrangements of units are parts of reference cycles. What a former one has held, several bytes per parameter, would stay
in memory until the collector comes, which it may not do for many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy, optim
from sp_lightning.pipeline import HostBackend
from sp_lightning.pipeline.lanes.lanes import Job, Ticket
from sp_lightning.trainer import host_memory

from .planning.parts import Fixed, Mapped, mapped_without_collector

WIDTH = 64


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    with mapped_without_collector() as mapped:
        yield mapped


class Blocks(L.LightningModule):
    """Blocks of layers."""

    def __init__(self, blocks: int = 8, width: int = WIDTH) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)]
        self.blocks = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Compares(L.Callback):
    """Compares what the summary says with what is in memory, when gradients of the last step are gone."""

    def __init__(self, mapped: Mapped) -> None:
        self.mapped = mapped
        self.most = 0
        self.arrangements = 0

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
            return  # gradients of the last step are still there, perhaps where a former arrangement has put them
        pipeline = trainer.strategy.pipeline
        summary = pipeline.summary()
        told = summary.host_bytes + summary.host_gradient_bytes + pipeline._engine.offloader.pool.nbytes
        assert self.mapped.nbytes() == told
        self.most = max(self.most, told)
        self.arrangements = pipeline.stats.arrangements


@pytest.mark.parametrize(
    ("build", "arguments", "options", "most"),
    [
        (Blocks, {}, {}, 8 + 1),
        (Blocks, {"precision": "bf16-mixed"}, {}, 8),  # fp32 gradients first, then copies of weights
        (Blocks, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}, {}, 10 + 1),  # sums in fp32, and copies
        (Blocks, {"precision": "bf16-mixed"}, {"activations": "offload"}, 8),
    ],
    ids=["fp32", "lowered", "accumulation", "offloaded activations"],
)
def test_what_a_former_arrangement_has_held_is_free(
    build: Callable[[], L.LightningModule],
    arguments: dict[str, Any],
    options: dict[str, Any],
    most: float,
    mapped: Mapped,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Units travel through two slots, then through four, and through three.

    In all, weights and gradients take at most so many bytes per parameter, those included that landing buffers take in
    a model with few units.
    """
    work = HostBackend.work

    def at_once(self: HostBackend, job: Job) -> Ticket:
        """Work without lagging behind, for which buffers are made where memory is to spare."""
        ticket = work(self, job)
        ticket.join()
        return ticket

    monkeypatch.setattr(HostBackend, "work", at_once)
    monkeypatch.setattr("sp_lightning.strategy.AutoPlanner", lambda *_: Fixed(*3 * [(2,)], *3 * [(4,)], (3,)))
    compares, module = Compares(mapped), build()
    how = {"accelerator": "cpu", "max_steps": 9, "barebones": True, "callbacks": [compares], **arguments}
    trainer = L.Trainer(strategy=SuperpipelineStrategy(**options), **how)
    trainer.fit(module, DataLoader(torch.randn(40, WIDTH), batch_size=2))
    assert compares.arrangements >= 3
    weights = sum(parameter.nbytes for parameter in module.parameters())
    assert compares.most > weights
    activations = 32 * 2**20 if "activations" in options else 0
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert mapped.most - activations < (most + 0.5) * parameters
    module.zero_grad()
    assert weights <= mapped.nbytes() < 1.2 * weights  # each of them begins at a multiple of 256 bytes


ADDED_UP = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("make", "arguments", "most", "gradients"),
    [
        (torch.optim.AdamW, {"gradient_clip_val": 1.0}, 12.0, 4.0),
        (partial(torch.optim.AdamW, fused=True), {"precision": "bf16-mixed"}, 14.0, 0.5),
        (torch.optim.AdamW, {"precision": "bf16-mixed", "gradient_clip_val": 1.0}, 14.0, 2.0),
        (torch.optim.AdamW, {"precision": "bf16-mixed", **ADDED_UP}, 14.0, 4.5),
        (optim.AdamW, {"precision": "bf16-true"}, 12.1, 0.5),
        (optim.AdamW, {"precision": "bf16-true", "gradient_clip_val": 1.0}, 12.1, 2.0),
        (optim.AdamW, {"precision": "bf16-true", **ADDED_UP}, 12.1, 2.5),
        (partial(optim.AdamW, moments="int8"), {"precision": "bf16-true"}, 6.3, 0.5),
    ],
    ids=["fp32, clipped", "mixed", "mixed, clipped", "mixed, added up", "split", "split, clipped", "split, added up"]
    + ["int8"],
)
def test_bytes_of_a_parameter(
    make: Any, arguments: dict[str, Any], most: float, gradients: float, mapped: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twelve blocks on a host without memory to spare: in buffers, and in the memory of the optimizer's state."""
    module, taken = Blocks(12, 256), []

    def count(*_: Any) -> None:
        pipeline, (optimizer,) = trainer.strategy.pipeline, trainer.optimizers
        pipeline._engine.settle()
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        state = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        taken.append((mapped.nbytes() + sum(state.values()), pipeline.summary().host_gradient_bytes))

    module.configure_optimizers = lambda: make(module.parameters(), lr=1e-3)  # type: ignore[method-assign]
    counts = L.pytorch.callbacks.LambdaCallback(on_before_backward=count)
    options = {"accelerator": "cpu", "max_steps": 4, "barebones": True, "strategy": SuperpipelineStrategy(k=2)}
    trainer = L.Trainer(callbacks=[counts], **options, **arguments)
    trainer.fit(module, DataLoader(torch.randn(8, 256), batch_size=2))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    in_all, of_gradients = taken[-1]
    print(f"\n{in_all / parameters:.2f} bytes per parameter, {of_gradients / parameters:.2f} of them for gradients")
    assert (in_all - of_gradients) / parameters < most + 0.05
    assert of_gradients / parameters < gradients + 0.05


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"amsgrad": True, "fused": True}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        ("SGD", {"momentum": 0.9}),
        *((name, {}) for name in ("AdamW", "Muon", "Adafactor")),
    ],
)
def test_state_is_known_before_it_is_made(kind: str, options: dict[str, Any]) -> None:
    """With whatever options, without a hook of real steps that would see it, and without a change to the optimizer."""
    weights = [nn.Parameter(torch.ones(size)) for size in [(100, 100), (100, 100), (7, 3)]]
    optimizer = getattr(torch.optim, kind)([{"params": weights}], **options)
    seen: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda stepped, *_: seen.append(stepped))
    said = host_memory.state_bytes(optimizer)
    handle.remove()
    assert not seen
    assert not optimizer.state
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [value for state in optimizer.state.values() for value in state.values()]
    assert said == sum(value.nbytes for value in state if isinstance(value, Tensor)) > 0


def test_state_that_is_not_known_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a step which needs a closure, or is a user's, whose code may do anything: it is not called."""
    weight, calls = nn.Parameter(torch.ones(4)), Mock()
    names = ("users", "torch.optim.users")
    own = [type("AdamW", (torch.optim.AdamW,), {"__module__": name, "step": calls}) for name in names]
    monkeypatch.setattr(torch.optim.Adam, "step", calls)  # as Lightning's own tests do
    for kind in (torch.optim.LBFGS, *own, torch.optim.Adam):
        assert host_memory.state_bytes(kind([weight])) == 0
    assert not calls.called


@pytest.mark.parametrize(("free", "clip"), [(700_000, 1.0), (10_000, None)])
def test_a_run_that_will_not_fit_is_refused(free: int, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained, with the numbers, and what takes less."""
    options = {"accelerator": "cpu", "max_steps": 1, "barebones": True, "gradient_clip_val": clip}
    trainer = L.Trainer(strategy="superpipeline", **options)
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: free)
    gradients = "260.0" if clip else "52.0"  # they wait for the norm, or pass through
    says = f"AdamW would keep 520.1 KiB of optimizer state .* and {gradients} KiB of gradients.*freeze weights"
    with pytest.raises(MisconfigurationException, match=says):
        trainer.fit(Blocks(), DataLoader(torch.randn(2, WIDTH), batch_size=2))
