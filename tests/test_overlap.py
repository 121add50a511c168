"""The optimizer under the device's computing: the numbers of a plain step, whoever looks, whatever happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, OnExceptionCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.trainer.precision import HostGradScaler

from .helpers import Trace, assert_same_trace, attached, note_state, slow_host
from .lightning_modules import trainer
from .zoo.blocks import WIDTH, Block, Chain

BLOCKS = 6

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adamw, a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


class Model(nn.Sequential):
    """Blocks, each of them a unit, and a head."""

    def __init__(self) -> None:
        super().__init__(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 3))


def rows(seed: int, count: int = 5) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------- plain loops


@pytest.mark.parametrize("autocast", [False, True])
def test_units_whose_step_ends_while_they_are_called_run_again_in_backward(autocast: bool) -> None:
    """The step's end is no write of their forward."""
    model = Chain([Block() for _ in range(BLOCKS)])
    with attached(model, debug=False, activations="recompute") as pipeline, slow_host(0.005):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, 5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = model(torch.ones(2, WIDTH)).float().square().mean()
            loss.backward()
            assert pipeline.stats.recomputed == number * (BLOCKS - 1) + 1, "the last one runs again in the first step"
            optimizer.step()


# --------------------------------------------------------------------------------------------------------- Lightning


class Module(L.LightningModule):
    """Trains the model, and nothing else: no hook that could look at anything."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.model = Model()
        self.optimizer_name = optimizer
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(batch).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer_name](self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(module: L.LightningModule, strategy: Any, steps: int = 5, **arguments: Any) -> Trace:
    torch.manual_seed(0)
    accumulate = arguments.get("accumulate_grad_batches", 1)
    ours = trainer(strategy, **{"max_epochs": 1, **arguments})
    ours.fit(module, DataLoader([rows(seed) for seed in range(steps * accumulate)], batch_size=None))
    trace: Trace = {f"loss {index}": loss for index, loss in enumerate(module.losses)}
    note_state(trace, "end", module, ours.optimizers)
    return trace


def strategy_for(streamed: bool, **options: Any) -> Any:
    return Counting(k=2, units=[Block], debug=True, **options) if streamed else SingleDeviceStrategy("cpu")


def assert_same(trained: Callable[[Any], Trace], **options: Any) -> tuple[Trace, Any]:
    """What comes of a plain strategy and of ours is the same; returns it, and the counters of the streamed run."""
    traces, strategies = [], [strategy_for(False), strategy_for(True, **options)]
    for strategy in strategies:
        torch.manual_seed(1)
        traces.append(trained(strategy))
    assert_same_trace(*traces)
    return traces[0], strategies[1].stats


def assert_same_fit(
    build: Callable[[], L.LightningModule] = Module, strategy: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """Returns the counters of the streamed run."""

    def trained(chosen: Any) -> Trace:
        module, callbacks = build(), [callback() for callback in arguments.get("callbacks", [])]
        return fit(module, chosen, **{**arguments, "callbacks": callbacks})

    return assert_same(trained, **(strategy or {}))[1]


class Counting(SuperpipelineStrategy):
    """Keeps the counters beyond the end."""

    def model_to_device(self) -> None:
        super().model_to_device()
        assert self.pipeline is not None
        self.stats = self.pipeline.stats


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_units_are_stepped_in_backward(name: str) -> None:
    """Also in the first step, in which the optimizer makes its state."""
    stats = assert_same_fit(lambda: Module(name))
    assert stats.steps_in_backward == 5 * BLOCKS
    assert stats.heals == 0


CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.01}
BY_VALUE: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
BY_TWOS: dict[str, Any] = {"accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("precision", "arguments"),
    [
        *product(["32-true", "bf16-mixed"], [{"accumulate_grad_batches": 3}]),
        *product(["32-true", "bf16-mixed", "bf16-true"], [BY_VALUE]),
        ("32-true", {"gradient_clip_val": 1e-3}),
        ("bf16-mixed", {"gradient_clip_val": 1e3}),
        *product(["bf16-mixed", "bf16-true"], [{"gradient_clip_val": 1e-3, **BY_TWOS}]),
    ],
    ids=str,
)
def test_accumulation_and_clipping(precision: str, arguments: dict[str, Any]) -> None:
    """A norm comes with the gradients; units wait for it and step under the next forward. Values are torch's."""
    stats = assert_same_fit(precision=precision, **arguments)
    assert stats.steps_in_backward == (0 if "gradient_clip_val" in arguments else 5 * BLOCKS)
    assert stats.overlapped_steps > 0 or arguments == BY_VALUE


def clamp_gradient(parameter: Tensor) -> None:
    parameter.grad.clamp_(-1e-4, 1e-4)


class Clamps(Module):
    """Has a hook on one weight that changes its gradient, and one on another that looks at it."""

    def on_fit_start(self) -> None:
        first, second, *_ = self.parameters()
        first.register_post_accumulate_grad_hook(clamp_gradient)
        second.register_post_accumulate_grad_hook(self.note_gradient)

    def note_gradient(self, parameter: Tensor) -> None:
        self.losses.append(parameter.grad.norm())


@pytest.mark.parametrize(
    ("precision", "accumulate", "overlap"), [("32-true", 1, "auto"), ("bf16-mixed", 2, True), ("bf16-true", 2, "auto")]
)
def test_hooks_on_accumulated_gradients(precision: str, accumulate: int, overlap: Any) -> None:
    """They are called when backward has ended, so their units are stepped after that, and others in backward."""
    strategy = {"overlap_optimizer": overlap}
    stats = assert_same_fit(Clamps, strategy, precision=precision, accumulate_grad_batches=accumulate)
    assert stats.steps_in_backward == 5 * (BLOCKS - 1)


def halve_all(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.mul_(0.5)


class Looking(Module):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.losses += [p.grad.detach().clone() for p in self.parameters()]


class Changing(Module):
    def on_after_backward(self) -> None:
        halve_all(self)


class Clipping(Module):
    def configure_gradient_clipping(self, optimizer: Optimizer, gradient_clip_val: Any = None, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class Twice(Module):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        (2 * loss).backward()


class Skipping(Module):
    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, closure: Any = None) -> None:
        if batch % 2:
            closure()
            return
        optimizer.step(closure=closure)


class Warming(Module):
    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (batch + 1)


class Averaging(Module):
    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += [p.detach().clone() for p in self.parameters()]
        self.losses += [p.grad.detach().clone() for p in self.parameters()]


class Converting(Module):
    """Saves itself in another precision: torch gives weights other memory, and the gradients, too, that are left."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.double()
        self.float()


class Reading(Module):
    """Looks at the gradients of the first step in the second one, before `zero_grad`."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 1:
            self.losses += [p.grad.clone() for p in self.parameters()]
        return super().training_step(batch, index)


class ReadingLater(Module):
    def on_before_zero_grad(self, *args: Any) -> None:
        if self.trainer.global_step == 1:
            self.losses += [p.grad.clone() for p in self.parameters() if p.grad is not None]


class AccumulatesLater(Module):
    """From the fourth batch on, two are added up, and Lightning does not zero what the step before has used."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        self.trainer.accumulate_grad_batches = 1 if index < 3 else 2


class Leaving(Module):
    """Zeroes gradients in every other step; in between they add up, as they were clipped."""

    def optimizer_zero_grad(self, epoch: int, batch: int, optimizer: Optimizer) -> None:
        if batch % 2:
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("build", "precision", "arguments"),
    [
        *product((Looking, Clipping, Skipping, Warming), ["32-true"], [{}]),
        *product((Changing, Clipping, Twice, Averaging, Converting, ReadingLater), ["bf16-mixed"], [{}]),
        *product((Converting, Reading, ReadingLater), ["32-true"], [CLIPPED]),
        *product((AccumulatesLater,), ["bf16-mixed"], [{}, CLIPPED]),
        *product((Leaving,), ["32-true", "bf16-mixed"], [{}, BY_TWOS, CLIPPED, BY_VALUE]),
        (Converting, "bf16-mixed", BY_TWOS),
    ],
)
def test_modules_with_unusual_training_steps_are_exact(
    build: type[Module], precision: str, arguments: dict[str, Any]
) -> None:
    assert_same_fit(build, precision=precision, **arguments)


@pytest.mark.parametrize(
    "fails", ["training_step", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_an_exception_in_mid_step(fails: str) -> None:
    """Weights are those of before the step, or of after it, as in plain training."""

    class Fault(Exception):
        pass

    class Failing(Module):
        pass

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.losses) == 3:
            raise Fault
        return getattr(Module, fails)(self, *args, **kwargs)

    setattr(Failing, fails, fail)

    def trained(strategy: Any) -> Trace:
        trace, module = Trace(), Failing()
        with pytest.raises(Fault):
            fit(module, strategy)
        note_state(trace, "after the exception", module, [])
        return trace

    assert_same(trained)


class Fails(Module):
    """Has a gradient in its third step that AdamW refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(2, WIDTH, sparse=True)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(self.rows(torch.zeros(5, dtype=torch.long)) if index == 2 else batch, index)


def test_an_exception_in_the_step_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    def trained(strategy: Any) -> Trace:
        folder = tmp_path / type(strategy).__name__
        with pytest.raises(RuntimeError, match="sparse"):
            fit(Fails(), strategy, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
        saved = torch.load(folder / "on_exception.ckpt", weights_only=False)
        return dict(enumerate(tree_leaves([saved["state_dict"], saved["optimizer_states"]])))

    assert_same(trained, overlap_optimizer=False)  # steps nothing in backward


def read_all(optimizer: Optimizer) -> Tensor:
    return torch.stack([p.grad.norm() for p in optimizer.param_groups[0]["params"]]).norm()


class ByNorm(torch.optim.lr_scheduler.LambdaLR):
    def step(self, *args: Any) -> None:
        if args or self.last_epoch >= 0:
            read_all(self.optimizer)
        super().step(*args)


class OwnScheduler(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        scheduler = ByNorm(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OwnBar(TQDMProgressBar):
    def get_metrics(self, trainer: L.Trainer, module: Any) -> Any:
        if trainer.global_step:
            read_all(trainer.optimizers[0])
        return super().get_metrics(trainer, module)


class OwnLogger(CSVLogger):
    def __init__(self, module: Any) -> None:
        super().__init__(".")
        self.module = module

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        if self.module.global_step:
            read_all(self.module.optimizers())


class Logging(Module):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.log("loss", loss := super().training_step(batch, index))
        return loss


READERS: dict[str, Callable[[], tuple[Module, dict[str, Any]]]] = {
    "training_step": lambda: (Reading(), {}),
    "scheduler": lambda: (OwnScheduler(), {}),
    "bar": lambda: (Module(), {"callbacks": [OwnBar()], "enable_progress_bar": True}),
    "logger": lambda: (module := Logging(), {"logger": OwnLogger(module), "log_every_n_steps": 1}),
}


@pytest.mark.parametrize("reader", READERS)
def test_gradients_that_a_step_in_backward_has_used_are_never_missed(reader: str) -> None:
    """Such a step keeps them only if a hook is overridden that may look at them."""
    module, arguments = READERS[reader]()
    with pytest.raises(RuntimeError, match="was used in an optimizer's step.*`overlap_optimizer=False`"):
        fit(module, strategy_for(True), **arguments)
    module, arguments = READERS[reader]()
    fit(module, strategy_for(True, overlap_optimizer=False), **arguments)


class Reads(Callback):
    """Looks at gradients in a hook; in the last ones the module is plain again."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.read)

    def read(self, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
        module.losses += [torch.zeros(1) if p.grad is None else p.grad.clone() for p in module.parameters()]


HOOKS = [
    *("on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start"),
    *("on_train_epoch_end", "on_train_end", "on_save_checkpoint", "on_fit_end", "teardown"),
]


@pytest.mark.parametrize("hook", HOOKS)
def test_any_hook_may_read_gradients(hook: str, tmp_path: Path) -> None:
    """Before the step, none is stepped in backward; after it, those that were are still there."""
    saves = {"enable_checkpointing": True, "default_root_dir": tmp_path} if hook == "on_save_checkpoint" else {}
    stats = assert_same_fit(callbacks=[partial(Reads, hook)], limit_val_batches=0, max_epochs=2, **saves)
    assert (stats.steps_in_backward > 0) is (hook != "on_before_optimizer_step")


class ClipsLater(Module):
    """Decides about clipping when Lightning's step is under way."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.trainer.gradient_clip_val = 1e-3 if index else None
        return super().training_step(batch, index)


class Appends(Module):
    """Adds a callback that changes gradients, in the middle of a step."""

    def on_before_backward(self, loss: Tensor) -> None:
        if self.global_step == 2:
            halves = LambdaCallback(on_before_optimizer_step=lambda _, module, __: halve_all(module))
            self.trainer.callbacks.append(halves)


@pytest.mark.parametrize("cls", [ClipsLater, Appends])
def test_what_decides_about_a_step_may_change_before_its_backward(cls: type[Module]) -> None:
    assert assert_same_fit(cls).steps_in_backward > 0


@pytest.mark.parametrize(
    ("overflow_at", "clip", "accumulate"), [(1, None, 1), (3, 0.01, 1), (1, 0.01, 2), (3, None, 2)]
)
def test_16_mixed_with_an_overflow(overflow_at: int, clip: float | None, accumulate: int) -> None:
    """The step is skipped, the scale goes down, nothing else changes."""

    class Overflowing(Module):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = super().training_step(batch, index)
            return loss * (math.inf if index == overflow_at else 1.0)

    def trained(strategy: Any) -> Trace:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
        how = {"plugins": [plugin], "gradient_clip_val": clip, "accumulate_grad_batches": accumulate, "steps": 4}
        trace = fit(Overflowing(), strategy, **how)
        trace["scale"] = torch.tensor(list(plugin.scaler.state_dict().values()))
        assert isinstance(plugin.scaler, HostGradScaler) is isinstance(strategy, Counting)
        return trace

    assert assert_same(trained)[0]["scale"][0] < 2.0**8


class ChangesGradients(DoublePrecision):
    """A precision plugin of a user's own."""

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.main_params(optimizer):
            parameter.grad.mul_(0.5)


class ChangesGradientsByAHook(Precision):
    """Another one, by a method that nothing public tells of."""

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        super()._after_closure(model, optimizer)
        halve_all(model)


class AddsUpItself(Module):
    """Returns losses, which its own `backward` reduces, and looks at gradients there."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch, index) * torch.ones(3, dtype=batch.dtype)

    def backward(self, loss: Tensor, *args: Any) -> None:
        loss.mean().backward()
        self.losses += [p.grad.norm() for p in self.parameters()]


class WarmsUp(Module):
    """Sets the learning rate when the step is about to begin."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.optimizers().optimizer.param_groups[0]["lr"] = 0.01 * (1 + self.global_step)


class HalvesInBackward:
    lightning_module: Module

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().backward(*args, **kwargs)  # type: ignore[misc]
        halve_all(self.lightning_module)
        return loss


class RunsBackwardItself:
    def backward(self, loss: Tensor, *args: Any) -> Tensor:
        (0.5 * loss).backward()
        return loss


@pytest.mark.parametrize("changes", [HalvesInBackward, RunsBackwardItself])
def test_strategies_of_users(changes: type) -> None:
    traces = []
    options = {"k": 2, "units": [Block], "memory_budget": "1GiB"}  # steps are watched, and may run again
    for base, chosen in [(SingleDeviceStrategy, {}), (SuperpipelineStrategy, options)]:
        torch.manual_seed(1)
        strategy: Any = type("Users", (changes, base), {"__module__": __name__})(**chosen)
        traces.append(fit(Module("momentum"), strategy))
    assert_same_trace(*traces)


@pytest.mark.parametrize(
    ("make", "plugins"),
    [(Module, [ChangesGradients]), (Module, [ChangesGradientsByAHook]), (AddsUpItself, []), (WarmsUp, [])],
    ids=["precision plugin", "its hook", "several losses", "learning rate"],
)
def test_user_code_around_backward_is_exact(make: type[Module], plugins: list[Any]) -> None:
    assert_same_fit(make, {"memory_budget": "1GiB"}, plugins=[plugin() for plugin in plugins], steps=4)
