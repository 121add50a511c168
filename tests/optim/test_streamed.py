"""Compact optimizers under the engine: stepped unit by unit, with the bits of plain steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy, optim
from sp_lightning.optim import of_torch
from sp_lightning.optim.passes import step_weights

from ..zoo.blocks import WIDTH, chain


class Module(L.LightningModule):
    def __init__(self, make: partial[torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self._make = chain(5), make

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = self._make(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Manual(Module):
    """Steps inside of `training_step`, around which Lightning sets torch's default dtype."""

    automatic_optimization = False

    def training_step(self, batch: Tensor) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()


def fit(
    strategy: Strategy, make: partial[torch.optim.Optimizer], cls: type[Module] = Module, **arguments: Any
) -> list[Tensor]:
    """Train; weights and all tensors of the optimizer's state."""
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, barebones=True, **arguments)
    torch.manual_seed(0)
    module = cls(make)
    trainer.fit(module, DataLoader(torch.randn(8, 2, WIDTH), batch_size=None))
    state = trainer.optimizers[0].state
    kept = [value for weight in module.parameters() for value in state[weight].values()]
    return [*(weight.detach() for weight in module.parameters()), *kept]


PLAIN: dict[str, object] = {}
CLIPPED: dict[str, object] = {"gradient_clip_val": 0.1}
BY_VALUE: dict[str, object] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
SUMS: dict[str, object] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
ADAMW = partial(optim.AdamW, lr=1e-2)
TORCHS = [
    partial(torch.optim.AdamW, lr=1e-2, fused=True),
    partial(torch.optim.Adam, lr=1e-2, fused=True, weight_decay=0.1),
]


@pytest.mark.parametrize(
    ("make", "precision", "arguments"),
    [
        *(
            (ADAMW, precision, each)
            for precision in ("32-true", "bf16-true", "bf16-mixed")
            for each in (PLAIN, CLIPPED, BY_VALUE, SUMS)
        ),
        # how a gradient is scaled does not depend on what is kept
        (partial(optim.AdamW, lr=1e-2, moments="int8"), "bf16-true", PLAIN),
        (partial(optim.Adam, lr=1e-2, moments="int8"), "bf16-true", SUMS),
        (partial(optim.Lion, lr=1e-2), "bf16-mixed", CLIPPED),
        (partial(optim.Lion, lr=1e-2, moments="int8"), "bf16-true", SUMS),
        *((make, "bf16-mixed", each) for make in TORCHS for each in (PLAIN, {"accumulate_grad_batches": 2})),
    ],
)
def test_units_are_stepped_in_one_pass_with_the_bits_of_a_plain_step(
    make: partial[torch.optim.Optimizer], precision: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, and torch's fused ones under mixed precision: cast, scale, clip, update and copy."""
    stepped: list[Any] = []
    monkeypatch.setattr(
        of_torch, "step_weights", lambda update, works: (stepped.extend(works), step_weights(update, works))
    )
    expected = fit(SingleDeviceStrategy(device="cpu"), make, precision=precision, **arguments)
    assert not stepped
    got = fit(SuperpipelineStrategy(k=2, k_prime=1), make, precision=precision, **arguments)
    assert stepped
    assert all(torch.equal(left, right) for left, right in zip(expected, got, strict=True))


class Counting(torch.optim.Optimizer):
    """A user's, whose state has the default dtype."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            count = self.state[p].setdefault("count", torch.zeros(()))
            p.sub_(p.grad * 0.1 / count.add_(0.7).to(p.dtype))
        return loss


@pytest.mark.parametrize("cls", [Module, Manual])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("make", [partial(torch.optim.NAdam, eps=1e-3), partial(Counting, defaults={"lr": 0.01})])
def test_state_has_the_default_dtype_of_the_users_thread(make: Any, precision: Any, cls: type[Module]) -> None:
    expected = fit(SingleDeviceStrategy(device="cpu"), make, cls, precision=precision)
    found = fit(SuperpipelineStrategy(k=2, k_prime=1), make, cls, precision=precision)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))


def test_torchs_optimizer_is_told_of_a_compact_checkpoint(tmp_path: Path) -> None:
    def trained(make: Any, resume: Path | None, epochs: int) -> L.Trainer:
        trainer = L.Trainer(
            accelerator="cpu", strategy=SuperpipelineStrategy(k=2, k_prime=1), precision="bf16-true", barebones=True,
            max_epochs=epochs,
        )  # fmt: skip
        torch.manual_seed(0)
        trainer.fit(Module(make), DataLoader(torch.randn(2, 2, WIDTH), batch_size=None), ckpt_path=resume)
        return trainer

    trained(ADAMW, None, 1).save_checkpoint(tmp_path / "a.ckpt")
    modules = (trained(ADAMW, resume, 2).lightning_module for resume in (None, tmp_path / "a.ckpt"))
    assert all(torch.equal(*pair) for pair in zip(*(module.parameters() for module in modules), strict=True))
    words = r"^AdamW cannot load this checkpoint: this is state of sp_lightning\.optim\.AdamW, .*Load it into"
    with pytest.raises(MisconfigurationException, match=words):
        trained(torch.optim.AdamW, tmp_path / "a.ckpt", 2)
