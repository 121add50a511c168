"""First steps that fail, for want of memory or because a unit cannot run again: only what is given up changes."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline import HostBackend

from .lightning_modules import trainer
from .planning.parts import Fixed
from .zoo.blocks import WIDTH, Block


@pytest.fixture(autouse=True)
def exhaustible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is taken for a device's, which no operation exhausts."""
    monkeypatch.setattr(HostBackend, "runs_out", True)


class Device:
    """Has so much memory: units fail in a forward or in a backward while more than that is in use.

    It is not an attribute of the module: what it counts would be put back as well.
    """

    current: Device

    def __init__(self, where: str, fits: Any, step: int = 0) -> None:
        self.where, self.fits, self.step = where, fits, step
        self.error: RuntimeError = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.failures = 0

    def use(self, where: str, module: Module) -> None:
        strategy = module.trainer.strategy
        pipeline = getattr(strategy, "pipeline", None)
        if pipeline is not None and where == self.where and module.calls > self.step and not self.fits(pipeline):
            self.failures += 1
            raise type(self.error)(*self.error.args)  # another one, as a traceback holds what failed


class Watched(torch.autograd.Function):
    """Uses the device's memory in the middle of a forward, or of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Module) -> Tensor:
        ctx.module = module
        Device.current.use("forward", module)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Device.current.use("backward", ctx.module)
        return gradient, None


class Module(LightningModule):
    """Everything that a failed attempt may leave behind: random numbers, statistics, metrics, logs, attributes."""

    def __init__(self, returns: str = "loss") -> None:
        super().__init__()
        self.returns = returns
        self.blocks = nn.ModuleList(Block(WIDTH, 24, dropout=0.2) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.metric = MeanMetric()
        self.losses: list[float] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2:
                x = Watched.apply(x, self)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.calls += 1
        noise = torch.randn(()) + random.random()
        loss = (self(batch[0]) * noise).square().mean()
        self.metric.update(loss.detach())
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return {"loss": loss, "more": 1} if self.returns == "dict" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


class Losses(Callback):
    """What Lightning tells callbacks."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.backward: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["loss"])

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.backward.append(loss.detach().clone())


def fit(module: Module, strategy: Any, **options: Any) -> list[Any]:
    """All that a user can see after six batches."""
    torch.manual_seed(1)
    random.seed(1)
    data = DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=4)
    losses, more = Losses(), options.pop("callbacks", [])
    options = {"max_epochs": 1, "log_every_n_steps": 1, **options}
    ours = trainer(strategy, callbacks=[losses, *more], **options)
    ours.fit(module, data)
    seen = [*module.state_dict().values(), *losses.seen, losses.backward[-1], torch.tensor(module.losses)]
    return [*seen, torch.tensor(module.calls), *(ours.callback_metrics[name] for name in ("loss_epoch", "metric"))]


@cache
def reference(returns: str = "loss", **options: Any) -> list[Any]:
    torch.manual_seed(0)
    Device.current = Device("never", None)
    return fit(Module(returns), "auto", **options)


def streamed(memory: Device, returns: str = "loss", strategy: Any = None, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    Device.current = memory
    return fit(Module(returns), strategy or SuperpipelineStrategy(units=Block), **options)


def same(expected: list[Any], found: list[Any]) -> bool:
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


def one_unit(pipeline: Any) -> bool:
    return bool(pipeline.summary().k == 1)


def run_with_and_without_failures(build: Callable[[], Module], where: str) -> tuple[list[Any], list[Any]]:
    """What plain training and a device that fails until `k` is one end with."""
    results = []
    for device, strategy in (
        (Device("never", None), "auto"),
        (Device(where, one_unit), SuperpipelineStrategy(units=Block)),
    ):
        torch.manual_seed(0)
        Device.current = device
        results.append(fit(build(), strategy))
    assert device.failures == 2
    return results[0], results[1]


def recomputed(pipeline: Any) -> bool:
    return bool(pipeline._activations._policy == "recompute_offload")


@pytest.mark.parametrize("fits", [one_unit, recomputed])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("returns", ["loss", "dict"])
def test_nothing_changes_but_the_window(returns: str, where: str, fits: Any) -> None:
    memory = Device(where, fits)
    with pytest.warns(UserWarning, match="memory did not suffice.*runs again"):
        assert same(reference(returns), streamed(memory, returns))
    assert memory.failures == (2 if fits is one_unit else 1)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "message",
    ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA error: out of memory"],
)
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_libraries_that_find_no_memory(message: str, where: str) -> None:
    """They do not ask torch for it, which reports that as an ordinary error."""
    memory = Device(where, one_unit)
    memory.error = RuntimeError(message)
    assert same(reference("loss"), streamed(memory, "loss"))
    assert memory.failures == 2


class Grows(Module):
    """Gets one more layer in each block before its last step, as a model does that is given another adapter."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx < 5:
            return
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Linear(WIDTH, WIDTH))
        added = [parameter for block in self.blocks for parameter in block.down[1].parameters()]
        self.trainer.optimizers[0].add_param_group({"params": added})


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_weights_that_were_added_just_before_the_step(where: str) -> None:
    """Their gradients are autograd's own until units are arranged anew, and go with the attempt that failed."""
    torch.manual_seed(0)
    Device.current = Device("never", None)
    expected = fit(Grows(), "auto")
    torch.manual_seed(0)
    Device.current = memory = Device(where, lambda pipeline: memory.failures > 0, step=5)
    with pytest.warns(UserWarning, match="memory did not suffice.*runs again"):
        assert same(expected, fit(Grows(), SuperpipelineStrategy(units=Block, overlap_optimizer=False)))
    assert memory.failures == 1


def test_other_errors_are_no_reason_to_run_again() -> None:
    memory = Device("forward", one_unit)
    memory.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        streamed(memory, "loss")
    assert memory.failures == 1


PLAIN: dict[str, Any] = {}
CLIPPED = {"gradient_clip_val": 0.1}
ACCUMULATED = {"accumulate_grad_batches": 3}
MIXED = {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("options", "where", "step"),
    [
        (PLAIN, "forward", 2),
        (CLIPPED, "forward", 1),
        (CLIPPED, "backward", 2),
        (ACCUMULATED, "forward", 1),
        (ACCUMULATED, "backward", 0),
        (MIXED, "forward", 2),
        (MIXED, "backward", 0),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_ways_to_train(options: dict[str, Any], where: str, step: int) -> None:
    memory = Device(where, one_unit, step)
    assert same(reference(**options), streamed(memory, **options))
    assert memory.failures == 2


class Updating(Module):
    """Gives its blocks a cache, which it changes in place after each of them."""

    def __init__(self, returns: str = "loss") -> None:
        super().__init__(returns)
        self.blocks = nn.ModuleList(WithCache(Block(WIDTH, 24, dropout=0.2)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        past = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, past)
            past.copy_(x.detach())
        return x


class WithCache(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return self.block(x + past)


@pytest.mark.parametrize("options", [PLAIN, CLIPPED, ACCUMULATED, MIXED], ids=str)
def test_units_that_cannot_run_again(options: dict[str, Any]) -> None:
    """By default nobody has to know of it: the first step runs again, and what these units save is held."""
    torch.manual_seed(0)
    expected = fit(Updating(), "auto", **options)
    torch.manual_seed(0)
    with pytest.warns(
        UserWarning, match=r"'blocks.5' has been modified .*: what it saves is held .* runs again"
    ) as told:
        found = fit(Updating(), SuperpipelineStrategy(units=WithCache, memory_budget="10MiB"), **options)
    assert same(expected, found)
    assert sum("runs again" in str(warning.message) for warning in told) == 1


class Cache:
    """Holds what blocks have computed, with its graph, as transformers' does in training."""

    alive: weakref.WeakSet[Cache] = weakref.WeakSet()

    def __init__(self) -> None:
        self.content: list[Tensor] = []
        self.alive.add(self)


class Caching(Module):
    def __init__(self, returns: str = "loss") -> None:
        super().__init__(returns)
        self.blocks = nn.ModuleList(IntoCache(Block(WIDTH, 24, dropout=0.2)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        assert not Cache.alive, "what an attempt that failed has computed is gone"
        x, cache = self.norm(x), Cache()
        for number, block in enumerate(self.blocks):
            x = block(x, cache)
            if number == 2:
                x = Watched.apply(x, self)
        return x


class IntoCache(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.content.append(self.block(x))
        return cache.content[-1]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_a_failed_attempt_holds_no_memory(where: str) -> None:
    """Its calls were to run again, with a cache that leads to the graph which holds them."""
    torch.manual_seed(0)
    Device.current = Device("never", None)
    expected = fit(Caching(), "auto")
    torch.manual_seed(0)
    Device.current = Device(where, one_unit)
    strategy = SuperpipelineStrategy(units=IntoCache, memory_budget="10MiB")
    assert same(expected, fit(Caching(), strategy))
    assert Device.current.failures == 2


class Tuned(Module):
    """Has a batch size, and runs out of memory with large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.windows: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if len(batch[0]) >= 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.windows.append(self.trainer.strategy.pipeline.summary().k)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=self.batch_size)


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_a_batch_size_that_was_only_tried_costs_nothing(tmp_path: Any) -> None:
    """What was given up for it is taken back when the tuner goes back to a smaller one."""
    Device.current = Device("never", None)
    module = Tuned()
    strategy = SuperpipelineStrategy(units=Block, memory_budget="1MiB")
    ours = trainer(strategy, default_root_dir=tmp_path, callbacks=BatchSizeFinder(max_trials=3))
    ours.fit(module)
    assert module.batch_size == 4
    after_tuning = module.windows[-2 * 6 :]
    assert after_tuning[0] == 2, "the usual window, which a planner may change"


def without_a_plan(pipeline: Any) -> bool:
    return pipeline.summary().plan is None or pipeline._arranger._learned.fresh_starts > 0


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_a_later_step_chooses_activations_anew(where: str) -> None:
    """For less memory, as the device's comes in pieces; one step that failed must not make all others slow."""
    memory, strategy = Device(where, without_a_plan), SuperpipelineStrategy(units=Block, memory_budget="20KiB")
    plans = Plans()
    assert same(reference(max_epochs=2), streamed(memory, strategy=strategy, max_epochs=2, callbacks=[plans]))
    assert memory.failures == 1
    planned = [plan is not None for plan in plans.seen]
    assert planned[3:] == [False, False, False, *[True] * 6], "measured once more, and planned once more"
    assert plans.seen[-1].device_bytes <= 0.85 * 20 * 1024


def not_kept(pipeline: Any) -> bool:
    return "keep" not in pipeline._activations.auto.in_use.values() or pipeline._arranger._learned.fresh_starts > 0


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_the_first_step_that_keeps_activations_may_fail(where: str) -> None:
    """Units lie where they lay before, and yet nothing is stepped in backward before it has worked once."""
    memory = Device(where, not_kept)
    strategy = SuperpipelineStrategy(units=Block, k=2, k_prime=1, memory_budget="1MiB")  # enough to keep all
    assert same(reference(), streamed(memory, strategy=strategy))
    assert memory.failures == 1


class Stepped(Callback):
    """After each batch: how many units were stepped in backward."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.strategy.pipeline.stats.steps_in_backward)


def test_what_worked_is_stepped_in_backward() -> None:
    """Also in the second step, which is recorded: it recomputes as the first one did, whatever is chosen by then."""
    stepped, strategy = Stepped(), SuperpipelineStrategy(units=Block, memory_budget="20KiB")
    streamed(Device("never", None), strategy=strategy, callbacks=[stepped])
    assert stepped.seen == [0, 6, 6, 6, 12, 18], "the third keeps activations, the fourth has another window"


class Unfreezing(Module):
    """Gets another arrangement long after the first steps, when a weight begins to require gradients."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[1].requires_grad_(self.calls >= 13)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_the_first_step_of_a_later_arrangement_may_fail(where: str) -> None:
    """It is as new as the first one."""
    results = []
    for memory, strategy in (
        (Device("never", None), "auto"),
        (Device(where, one_unit, step=13), SuperpipelineStrategy(units=Block)),
    ):
        torch.manual_seed(0)
        Device.current = memory
        results.append(fit(Unfreezing(), strategy, max_epochs=3))
    assert same(*results)
    assert memory.failures == 2


class Looped(Module):
    """Calls one block several times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH, 24, dropout=0.2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for number in range(5):
            x = self.blocks[0](x)
            if number == 3:
                x = Watched.apply(x, self)
        return x


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_a_block_that_is_called_several_times_becomes_a_unit(where: str) -> None:
    """It was divided into its layers, so that something streams; but to recompute calls of those saves nothing."""
    torch.manual_seed(0)
    Device.current = Device("never", None)
    expected = fit(Looped(), "auto")
    torch.manual_seed(0)
    units: list[Any] = []

    def is_whole(pipeline: Any) -> bool:
        units.append(pipeline.summary().unit_names)
        return "blocks.0" in units[-1]

    memory = Device.current = Device(where, is_whole)
    assert same(expected, fit(Looped(), SuperpipelineStrategy(memory_budget="10MiB")))
    assert memory.failures == 1


def test_a_block_that_is_larger_than_activations_stays_divided() -> None:
    """It is weights that do not fit."""
    torch.manual_seed(0)
    Device.current = Device("forward", one_unit)
    module = Looped()
    module.blocks[0] = nn.Sequential(Block(WIDTH, 2000), Block(WIDTH, 2000))
    with pytest.warns(UserWarning, match="memory did not suffice") as told:
        fit(module, SuperpipelineStrategy(memory_budget="10MiB"))
    assert not any("not divided" in str(warning.message) for warning in told)


class Plans(Callback):
    """What was planned when each batch had been trained with."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.strategy.pipeline.summary().plan)


def test_units_set_to_recompute_raise_if_their_inputs_change() -> None:
    strategy = SuperpipelineStrategy(units=WithCache, memory_budget="10MiB", activations="recompute")
    with pytest.raises(RuntimeError, match=r"'blocks.5' has been modified .* cannot run again"):
        fit(Updating(), strategy)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("options", [CLIPPED, MIXED], ids=str)
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_units_that_live_on_the_device_go_back(
    options: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What autograd has collected there when backward fails is not left."""
    planner = Fixed((2, 1), (2, 1), (2, 1, (), range(3, 6)))
    monkeypatch.setattr("sp_lightning.strategy.AutoPlanner", lambda *_: planner)
    memory = Device(where, lambda pipeline: not pipeline.arrangement.parameters_on_device)
    assert same(reference(**options), streamed(memory, **options))
    assert memory.failures == 1


@pytest.mark.parametrize(
    ("options", "step", "message"),
    [(PLAIN, 2, "CUDA out of memory.*\\n.*the optimizer has stepped already"), (ACCUMULATED, 1, "CUDA out of memory")],
    ids=["stepped", "accumulated"],
)
def test_steps_that_cannot_run_again_raise(options: dict[str, Any], step: int, message: str) -> None:
    """Units that were stepped in backward, and sums that were added to, cannot be told from what they were."""
    memory = Device("backward", one_unit, step)
    with pytest.raises(torch.OutOfMemoryError, match=message):
        streamed(memory, **options)
    assert memory.failures == 1


def test_out_of_memory_raises_at_the_smallest_window() -> None:
    memory = Device("forward", lambda pipeline: False)
    with (
        pytest.warns(UserWarning, match="memory did not suffice"),
        pytest.raises(
            torch.OutOfMemoryError,
            match=r"CUDA out of memory.*\n.*`k=1` a step needs [\d.]+ KiB for .*each: smaller `units`, for a large",
        ),
    ):
        streamed(memory)
    assert memory.failures == 3


def test_choices_of_the_user_are_kept() -> None:
    memory = Device("forward", one_unit)
    strategy = SuperpipelineStrategy(units=Block, k=3, activations="keep")
    offered = r"each: `SuperpipelineStrategy\(activations='recompute_offload'\)`, `k=1`, smaller `units`"
    with pytest.raises(torch.OutOfMemoryError, match=offered):
        streamed(memory, strategy=strategy)
    assert memory.failures == 1


class Growing(Module):
    """Has one batch that is larger than all before it, long after the first steps."""

    def on_before_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0].repeat(5, 1)] if self.calls == 14 else batch


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_largest_batch_so_far_may_fail(where: str) -> None:
    """However late it comes: memory may have been filled by what smaller ones left free."""
    torch.manual_seed(0)
    Device.current = Device("never", None)
    expected = fit(Growing(), "auto", max_epochs=3)
    torch.manual_seed(0)
    memory = Device.current = Device(where, without_a_plan, step=14)
    found = fit(Growing(), SuperpipelineStrategy(units=Block, memory_budget="20KiB"), max_epochs=3)
    assert same(expected, found)
    assert memory.failures == 1


def test_later_steps_raise() -> None:
    """They are not watched, because watching costs time."""
    memory = Device("forward", one_unit, step=9)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        streamed(memory, max_epochs=2)
    assert memory.failures == 1


class Evaluated(Module):
    """Changes its batch, a tensor of its own, a metric and what it logs, in the ways in which users do."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.calls += 1
        self.total += 1  # of what inference mode has made from the second batch on, no version tells
        if torch.is_inference_mode_enabled():
            batch[0].mul_(2)
        out: Tensor = self(batch[0]) * torch.randn(())
        self.total = self.total + out.sum()
        self.metric.update(out.mean())
        self.log("metric", self.metric)
        self.log("loss", out.square().mean())
        return out

    test_step = validation_step
    predict_step = validation_step

    def log(self, *args: Any, **options: Any) -> None:
        if not self.trainer.predicting:
            super().log(*args, **options)


def evaluated(strategy: Any, way: str, inference_mode: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module = Evaluated()
    torch.manual_seed(1)
    ours = trainer(strategy, inference_mode=inference_mode)
    outputs = getattr(ours, way)(module, DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=4))
    seen = outputs if way == "predict" else [torch.tensor(value) for value in outputs[0].values()]
    return [*seen, module.total, torch.tensor(module.calls), torch.randn(1)]


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("way", ["validate", "test", "predict"])
@pytest.mark.parametrize(("budget", "fits", "step"), [("10MiB", one_unit, 3), ("20KiB", without_a_plan, 5)])
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_evaluation(way: str, inference_mode: bool, budget: str, fits: Any, step: int) -> None:
    """A batch that does not fit runs again with fewer weights on the device, as if for the first time."""
    Device.current = Device("never", None)
    expected = evaluated("auto", way, inference_mode)
    memory = Device.current = Device("forward", fits, step)
    strategy = SuperpipelineStrategy(units=Block, memory_budget=budget)
    assert same(expected, evaluated(strategy, way, inference_mode))
    assert memory.failures >= 1


class Validated(Evaluated):
    """Fails in a validation, before its first training step or after some."""

    def forward(self, x: Tensor) -> Tensor:
        Device.current.where = "never" if self.training else "forward"
        return super().forward(x)


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_validation_in_a_training(sanity: int) -> None:
    """Training goes on as it was, but for the window: what its activations take has nothing to do with it."""
    memory = Device.current = Device("forward", one_unit)
    strategy = SuperpipelineStrategy(units=Block, memory_budget="10MiB", k_prime=1)
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=4)
    module = Validated()
    policies = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            policies.append(trainer.strategy.pipeline.survey.activations is not None)

    ours = trainer(strategy, max_epochs=1, num_sanity_val_steps=sanity, callbacks=[Looks()])
    ours.fit(module, data, data)
    assert memory.failures >= 1
    assert all(policies)


def test_an_evaluation_that_does_not_fit() -> None:
    memory = Device.current = Device("forward", lambda pipeline: False)
    with (
        pytest.warns(UserWarning, match="memory did not suffice"),
        pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory.*\n.*With `k=1` a step needs .* smaller"),
    ):
        evaluated(SuperpipelineStrategy(units=Block), "validate", True)
    assert memory.failures == 2


class Iterates(Module):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


def test_a_step_that_takes_its_batch_itself() -> None:
    """It would go on with the next one."""
    Device.current = Device("forward", one_unit)
    with pytest.raises(torch.OutOfMemoryError, match="cannot run again, because it takes its batch from an iterator"):
        fit(Iterates(), SuperpipelineStrategy(units=Block))


class HasHooks(Module):
    """Changes all kinds of state between forward and backward, where its next forwards and its checkpoint see it."""

    def __init__(self, returns: str = "loss") -> None:
        super().__init__(returns)
        self.register_buffer("count", torch.zeros(()))
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)
        self.noise = 1.0
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"first": 0}
        self.kinds = {"first"}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.history.append("step")
        self.table["steps"] = self.calls
        noise = self.noise + self.count
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
        return super().training_step([batch[0] * noise], batch_idx)

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.count += 1
        self.noise = torch.rand(()).item() + random.random()
        self.history.append(self.noise)
        self.table.pop("first", None)
        self.table[str(self.noise)] = self.noise
        self.kinds.symmetric_difference_update(["first", self.calls])
        for average, parameter in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
            average.lerp_(parameter, 0.1)

    def on_before_backward(self, loss: Tensor) -> None:
        self.blocks[3].train(self.calls % 2 == 0)
        self.log("noise", self.noise + torch.rand(()))
        self.history = self.history[-5:]


@pytest.mark.parametrize("options", [PLAIN, ACCUMULATED], ids=str)
@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_hooks_before_backward_do_not_run_again(options: dict[str, Any]) -> None:
    """What they have changed stays, although the forward before them runs again."""
    results, left = [], []
    for device, strategy in (
        (Device("never", None), "auto"),
        (Device("backward", one_unit), SuperpipelineStrategy(units=Block)),
    ):
        torch.manual_seed(0)
        Device.current = device
        module = HasHooks()
        results.append([*fit(module, strategy, **options), module.trainer.callback_metrics["noise"]])
        left.append([module.noise, module.history, module.table, module.kinds])
    assert device.failures == 2
    assert same(*results)
    assert left[0] == left[1]


class Teaches(Module):
    """Learns from an average of its weights, which it updates between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.average[0](x)

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        for average, parameter in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
            average.lerp_(parameter + 1, 0.1)


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_a_second_run_with_another_loss_warns() -> None:
    Device.current = Device("backward", one_unit)
    with pytest.warns(UserWarning, match="When the step ran again, its loss was"):
        fit(Teaches(), SuperpipelineStrategy(units=Block))


class Averages(nn.Module):
    """Changes a buffer that is too large to be restored for no good reason, and does so past its version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(100_000))

    def forward(self, x: Tensor) -> Tensor:
        self.average.data.mul_(0.9)
        return x * self.average.mean()


class Averaging(Module):
    def __init__(self, returns: str = "loss") -> None:
        super().__init__(returns)
        self.blocks.append(Averages())
        self.blocks.insert(0, Averages())


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_buffers_that_are_changed_past_their_version() -> None:
    """They are put back, too."""
    assert same(*run_with_and_without_failures(Averaging, "forward"))


class Clamped(Block):
    """Changes a weight in its forward."""

    def __init__(self, data: bool) -> None:
        super().__init__(WIDTH, 24)
        self.data = data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.up.weight.data if self.data else self.up.weight).mul_(0.9)
        return super().forward(x)


class InItsForward(Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks.insert(0, Clamped(data=way == "data"))


class AroundForwards(Module):
    """Averages the weights of one block into another, as momentum encoders do; timm takes their `state_dict`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        for mean, own in zip(*(WAYS[self.way](self.blocks[index]) for index in (0, 1)), strict=True):
            mean.lerp_(own, 0.1)
        with torch.enable_grad():
            return super().forward(x)


WAYS: dict[str, Callable[[nn.Module], Iterable[Tensor]]] = {
    "itself": lambda block: block.parameters(),
    "data": lambda block: (weight.data for weight in block.parameters()),
    "state_dict": lambda block: block.state_dict().values(),
    "detach": lambda block: (weight.detach() for weight in block.parameters()),
    "numpy": lambda block: (torch.from_numpy(weight.detach().numpy()) for weight in block.parameters()),
}
ALIASES = ["state_dict", "detach", "numpy"]


def little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little to copy weights: of eight thousand bytes, a thousand."""
    monkeypatch.setattr("sp_lightning.pipeline.weights.journal._LEAST_COPIED", 0)
    monkeypatch.setattr("sp_lightning.pipeline.weights.journal.available_host_memory", lambda: 8000)


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ["itself", "data"])
@pytest.mark.parametrize("kind", [InItsForward, AroundForwards])
def test_a_step_that_writes_to_weights(kind: Callable[[str], Module], way: str, where: str) -> None:
    """They are put back before it runs again."""
    assert same(*run_with_and_without_failures(lambda: kind(way), where))


@pytest.mark.parametrize("way", ["itself", "data"])
@pytest.mark.parametrize("kind", [InItsForward, AroundForwards])
def test_a_step_that_writes_to_large_weights(
    kind: Callable[[str], Module], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are not copied, and would be changed once more."""
    little_host_memory(monkeypatch)
    Device.current = Device("forward", one_unit)
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot run again, because it writes to weight 'blocks\.0\.up"):
        fit(kind(way), SuperpipelineStrategy(units=Block))


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ALIASES)
def test_a_step_that_writes_to_aliases_of_weights(way: str, where: str) -> None:
    """Weights are put back, too, if it reaches them through what shares their memory."""
    assert same(*run_with_and_without_failures(lambda: AroundForwards(way), where))


@pytest.mark.parametrize("way", ALIASES)
def test_a_step_that_writes_to_aliases_of_large_weights(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    little_host_memory(monkeypatch)
    Device.current = Device("backward", one_unit)
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot run again, because it writes to weight 'blocks\.0\."):
        fit(AroundForwards(way), SuperpipelineStrategy(units=Block))


class ReadsAllWeights(Module):
    """Looks at everything that it has, and changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        self.sums = [value.sum() for value in self.state_dict().values()]
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_reads_aliases_of_large_weights(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run again, whatever their size."""
    little_host_memory(monkeypatch)
    assert same(*run_with_and_without_failures(ReadsAllWeights, where))


class ReadsWhatAHookWrites(HasHooks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.state_dict()
        return super().training_step(batch, batch_idx)

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_zero_grad(optimizer)
        for parameter in self.average.parameters():
            parameter += 1


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
def test_weights_that_only_a_hook_writes_to() -> None:
    """That the step had an alias of them undoes nothing."""
    assert same(*run_with_and_without_failures(ReadsWhatAHookWrites, "backward"))


class Graphs(LightningModule):
    """Its batches are sparse: edges, and features of the nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        edges, x = batch
        for layer in self.layers:
            x = torch.sparse.mm(edges, layer(x)).tanh()
        loss = x.square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("activations", ["auto", "recompute"])
def test_sparse_batches_are_watched_as_well(activations: Any) -> None:
    """Their size is taken though they have no `nbytes`."""
    data = [(torch.ones(4, 4).triu().to_sparse(), torch.full((4, WIDTH), float(number))) for number in range(4)]
    losses = []
    for strategy in ("auto", SuperpipelineStrategy(memory_budget="1MiB", activations=activations)):
        module = Graphs()
        trainer(strategy, max_epochs=1).fit(module, DataLoader(data, batch_size=None))
        losses.append(module.losses)
    assert losses[0] == losses[1]


class Manual(Module):
    """Drops gradients after the optimizer has stepped, and fails in its second backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        where, Device.current.where = Device.current.where, "never"
        self.manual_backward(self(batch[0]).square().mean())
        Device.current.where = where
        super().training_step(batch, batch_idx)
        self.manual_backward(self(batch[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def manually(strategy: Any, build: Callable[[], Module] = Manual) -> list[Tensor]:
    torch.manual_seed(0)
    module = build()
    torch.manual_seed(1)
    random.seed(1)
    trainer(strategy, max_epochs=1).fit(module, DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=4))
    return [*module.state_dict().values()]


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_a_step_that_failed_are_dropped(where: str) -> None:
    """Those of a backward pass that had ended, too."""
    Device.current = Device("never", None)
    expected = manually("auto")
    memory = Device.current = Device(where, one_unit)
    assert same(expected, manually(SuperpipelineStrategy(units=Block)))
    assert memory.failures == 2


class Toggles(Manual):
    """Freezes weights and registers hooks for a while, as a GAN's step does."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        frozen = self.blocks[0].up.weight
        frozen.requires_grad_(not frozen.requires_grad)
        handles = [
            self.blocks[1].up.register_full_backward_hook(lambda module, given, _: (given[0] * 1.5,)),
            self.blocks[4].up.register_full_backward_pre_hook(lambda module, given: (given[0] * 1.5,)),
            self.blocks[5].up.weight.register_hook(lambda gradient: gradient * 1.5),
        ]
        super().training_step(batch, batch_idx)
        for handle in handles:
            handle.remove()
        frozen.requires_grad_(not frozen.requires_grad)
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:The device's memory did not suffice")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_step_turns_on_for_a_while_is_off_when_it_runs_again(where: str) -> None:
    Device.current = Device("never", None)
    expected = manually("auto", Toggles)
    memory = Device.current = Device(where, one_unit)
    assert same(expected, manually(SuperpipelineStrategy(units=Block), Toggles))
    assert memory.failures == 2


class WritesElsewhere(Module):
    """Writes to a weight that is not streamed: in the memory of another one, or of a unit that lives on the device."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.one = nn.Parameter(torch.ones(WIDTH))
        self.other = nn.Parameter(self.one.data)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        with torch.no_grad():
            self.get_parameter(self.name).mul_(0.9)
        return super().training_step([batch[0] * self.one * self.other], batch_idx)


@pytest.mark.parametrize("name", ["one", "blocks.4.up.weight"])
def test_a_step_that_writes_to_weights_that_are_not_streamed_does_not_run_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Fixed((2, 1), (2, 1), (2, 1, (), range(3, 6)))
    monkeypatch.setattr("sp_lightning.strategy.AutoPlanner", lambda *_: planner)
    Device.current = Device("forward", lambda pipeline: not pipeline.arrangement.parameters_on_device)
    with pytest.raises(torch.OutOfMemoryError, match=f"cannot run again, because it writes to weight '{name}'"):
        fit(WritesElsewhere(name), SuperpipelineStrategy(units=Block))


class BackwardTooEarly(Callback):
    """Runs backward itself from the loss that it is shown."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        loss.backward(retain_graph=True)


def test_backward_from_the_loss_that_a_hook_is_shown_is_an_error() -> None:
    Device.current = Device("never", None)
    with pytest.raises(RuntimeError, match="has no graph of the model, because the step may have to run again"):
        fit(Module(), SuperpipelineStrategy(units=Block), callbacks=[BackwardTooEarly()])
