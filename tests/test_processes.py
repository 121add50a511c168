"""Several processes under Lightning: each number is that of Lightning's `DDPStrategy`, in every process."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, IterableDataset

from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy, optim
from sp_lightning.pipeline.optimizer import state_file

from .helpers import Trace, assert_close_trace, assert_same_trace, ram_is_full
from .lightning_modules import WIDTH, Adversaries, Average, Base, fit, loader, plain, run, streamed, trainer
from .planning.parts import Fixed
from .processes import in_processes, run_python
from .zoo.blocks import LoRALinear
from .zoo.quantized import Int8Linear, PackedLinear

Drive = Callable[[L.Trainer, Any], Any]
OF_STATE = re.compile(r"optimizer \d+ / \d+ / ")


def assert_as_ddp(
    make: Callable[[], Base] = Base,
    drive: Drive = fit,
    strategy: dict[str, Any] | None = None,
    compare: Callable[[Trace, Trace], None] = assert_same_trace,
    **arguments: Any,
) -> None:
    """Bit-equality with `DDPStrategy`, of all that this process sees."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    arguments = {"devices": 2, **arguments}

    def fresh() -> dict[str, Any]:
        return {**arguments, "callbacks": [arguments["callbacks"]()] if "callbacks" in arguments else None}

    expected = run(DDPStrategy(find_unused_parameters=True), make, drive, fresh)
    actual = run(streamed(**(strategy or {})), make, drive, fresh)
    assert any("loss" in label for label in expected), "nothing was compared"
    if dist.get_rank():  # the first process has the optimizer's state, for all of them
        expected, actual = ({k: v for k, v in t.items() if not OF_STATE.search(k)} for t in (expected, actual))
    compare(expected, actual)


# ------------------------------------------------------------------------------------------------- ways of training


def as_it_comes() -> None:
    assert_as_ddp(gradient_clip_val=0.1)
    assert_as_ddp(Descends, accumulate_grad_batches=2, num_sanity_val_steps=1, compare=assert_close_trace)


def mixed_precision() -> None:
    assert_as_ddp(Silent, precision="bf16-mixed", gradient_clip_val=0.1)
    assert_as_ddp(Descends, precision="16-mixed", accumulate_grad_batches=2, compare=assert_close_trace)
    assert_as_ddp(precision="bf16-true")
    for InFP32.kind in ("in all", "in one"):
        assert_as_ddp(InFP32, precision="bf16-mixed", limit_val_batches=1)
        assert InFP32.lowered == {"blocks.1", "blocks.2", "blocks.3"}


def gradients_after_the_run() -> None:
    """Those of the last step are there where clipping has kept them, in all processes."""
    assert_as_ddp(Silent, drive=leave_gradients, gradient_clip_val=0.1)


def options() -> None:
    assert_as_ddp(Silent, strategy={"activations": "offload", "k": 1})
    assert_as_ddp(Silent, strategy={"activations": "recompute", "overlap_optimizer": False})


def compact_optimizers() -> None:
    class Compact(Silent):
        def configure_optimizers(self) -> Any:
            return optim.AdamW(self.parameters(), lr=1e-2, moments=self.moments)

    for Compact.moments in ("fp32", "int8"):
        assert_as_ddp(Compact, precision="bf16-true", gradient_clip_val=0.1)


def state_on_a_drive() -> None:
    """It belongs to the first process alone."""

    class Compact(Silent):
        def configure_optimizers(self) -> Any:
            return optim.AdamW(self.parameters(), lr=1e-2, moments="int8")

    for arguments in ({}, {"precision": "bf16-true", "gradient_clip_val": 0.1}):
        with ram_is_full(), mock.patch.object(state_file, "StateFile", wraps=state_file.StateFile) as made:
            assert_as_ddp(Compact, strategy={"nvme_path": "."}, **arguments)
        assert bool(made.call_count) == (dist.get_rank() == 0)


def units_that_live_on_the_device() -> None:
    """From some step on, then others, then none, then all, and what is resident, too; they take no host memory."""
    windows = [(2,), (2, (0, 3)), (2, (0, 3)), (2, (2, 3, 4)), (2,), (2, range(9))]
    for make, arguments in [
        (Base, {"gradient_clip_val": 0.1}),
        (Silent, {"precision": "bf16-mixed"}),
        (type("LeavesOut", (LeftOut, Silent), {}), {}),
        (ByOwnCode, {}),
    ]:
        planner = Fixed(*windows)
        with mock.patch("sp_lightning.strategy.AutoPlanner", return_value=planner):
            assert_as_ddp(make, strategy={"k": "auto"}, **{"max_epochs": 3, **arguments})
        assert len({on_device for *_, on_device in planner.seen}) >= 4, "units came and went"
        assert planner.host_bytes == 0, "all live on the device at the end"


def refused_optimizers() -> None:
    """Those that step or send weights by themselves, in each process."""
    for make in (partial(torch.optim.LBFGS, lr=0.1), partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)):
        module = Silent()
        module.configure_optimizers = lambda make=make, module=module: make(module.parameters())
        with pytest.raises(ValueError, match="keeps or sends weights in each process"):
            fit(trainer(streamed(), devices=2), module)


def two_machines() -> None:
    """Of two processes each, which exchange sums of gradients between the first ones; only rounding differs."""
    rank = dist.get_rank()
    os.environ.update(NODE_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2))
    assert_as_ddp(Descends, num_nodes=2, gradient_clip_val=0.1, compare=assert_close_trace)

    class Noted(Silent):
        noted: ClassVar[list[Any]] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_start(self) -> None:
            self.noted.append(getattr(self.trainer.strategy, "pipeline", None))

    assert_as_ddp(Noted, num_nodes=2, compare=assert_close_trace)
    assert Noted.noted[-1].stats.steps_in_backward, "units are stepped as their sums come"


@pytest.mark.usefixtures("server")
def test_ways_of_training() -> None:
    in_processes(
        [
            as_it_comes,
            mixed_precision,
            options,
            gradients_after_the_run,
            compact_optimizers,
            state_on_a_drive,
            refused_optimizers,
            units_that_live_on_the_device,
        ]
    )
    in_processes([two_machines], count=4)


# --------------------------------------------------------------------------------------------------------- modules


class Silent(Base):
    """Nobody looks at gradients, so units are stepped in backward."""

    on_before_optimizer_step = L.LightningModule.on_before_optimizer_step


def leave_gradients(trainer: L.Trainer, module: Base) -> list[Tensor | None]:
    trainer.fit(module, loader())  # a validation would zero them
    return [weight.grad for weight in module.parameters()]


class InFP32(Silent):
    """Its first block computes in fp32, in all processes or in one."""

    kind = "in all"
    lowered: ClassVar[set[str]] = set()

    def forward(self, x: Tensor) -> Tensor:
        enabled = self.kind == "in one" and self.global_rank == 0
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)

    def on_train_end(self) -> None:
        pipeline = getattr(self.trainer.strategy, "pipeline", None)
        if pipeline is not None:
            weights = pipeline.arrangement.weights
            InFP32.lowered = {weight.name[:8] for weight in weights if weight.lowered} - {"head.wei", "head.bia"}


class Descends(Base):
    """By an optimizer that does not blow up how sums were rounded."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Quantized(Silent):
    """Adapters beside frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = LoRALinear(PackedLinear(block.up)), LoRALinear(Int8Linear(block.down))


class LeftOut(Base):
    """Each process leaves out other blocks."""

    def path(self) -> Iterable[nn.Module]:
        left_out = self.global_rank + self.global_step
        return [block for number, block in enumerate(self.blocks) if (number + left_out) % 3]


class InOtherOrders(Silent):
    """The processes come to the same weights at different moments, while units are stepped in backward."""

    def path(self) -> Iterable[nn.Module]:
        return self.blocks if self.global_rank else reversed(self.blocks)


class Experts(Base):
    """Each process asks other experts of a block, and two blocks have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.blocks[3].up.weight = self.blocks[1].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.experts[(self.global_rank + 2 * self.global_step) % 4](x)
        return super().forward(x)


class Synced(Base):
    """Values are logged as means over processes. A weight without a gradient keeps none, and is not decayed."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("everyones_loss", loss, sync_dist=True)
        self.note("all losses", self.all_gather(loss.detach()))
        return loss


class ByOwnCode(Adversaries):
    """All weights are stepped at once by the optimizers' own code, and one process is quick to compute with them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        time.sleep(0.05 * (1 - self.global_rank))
        with torch.no_grad():
            self.note("output", self(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: None)
        return optimizers


class LateCritic(Adversaries):
    """Weights that nobody knows in the first step, cast twice in the first graph that has them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step or batch_idx:
            super().training_step(batch, batch_idx)
            return
        generate, _ = self.optimizers()
        generate.zero_grad()
        self.manual_backward(self(batch[0]).square().mean())
        generate.step()


class TwiceInOne(Silent):
    """One process takes a branch from the second step on, and takes it twice from the third on."""

    def path(self) -> Iterable[nn.Module]:
        turns = min(2, self.global_step * self.global_rank) if self.training else 1
        return [*self.blocks[:2], *[*self.blocks[2:]] * turns]


class InTwoTurns(Silent):
    """Each unit is called before all others, on what requires no gradient, and after; some of it is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 3, 4, 1):
            x = x + self.blocks[number](x)
        return self.head(x)


class WithoutDropout(Silent):
    """The same numbers whatever random numbers were drawn before."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.drop.p = 0.0


class ValidatesLate(WithoutDropout):
    """In one process, when the other may be about to write an average to the weights; and training reads a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.blocks[0].norm.running_mean[:WIDTH])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.05 * self.global_rank)
        return super().validation_step(batch, batch_idx)


class MeanOfAll(torch.autograd.Function):
    """The mean over processes, which meet in backward, too."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return MeanOfAll.forward(None, gradient)


class MeetsInBackward(Silent):
    """Processes wait for each other in backward, above and below of blocks that one of them leaves out."""

    def path(self) -> Iterable[nn.Module]:
        return self.blocks if self.global_rank else self.blocks[:1]

    def forward(self, x: Tensor) -> Tensor:
        x = MeanOfAll.apply(self.blocks[0](x))
        for block in self.path():
            x = block(x)
        x = MeanOfAll.apply(x)
        return self.head(x) if self.global_rank else x[:, :2]


class Thawed(Base):
    """Half of it is frozen before it is attached, and thawed between batches, again and again."""

    def setup(self, stage: str) -> None:
        if not isinstance(self.trainer.strategy, DDPStrategy):  # which never averages what it finds frozen
            self.blocks[:2].requires_grad_(False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[:2].requires_grad_(self.global_step % 3 > 0)


class Finetuned(Silent):
    """A callback freezes half of it before training, and thaws that as an epoch begins."""

    @property
    def backbone(self) -> nn.Module:
        return self.blocks[:2]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.blocks[2:].parameters(), *self.head.parameters()], lr=1e-2)


class Finetunes(callbacks.BackboneFinetuning):
    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        if not isinstance(trainer.strategy, DDPStrategy):
            super().setup(trainer, module, stage)

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        self.freeze_before_training(module)
        super().on_fit_start(trainer, module)


class ReadsLate(Silent):
    """One process reads what a step has left of gradients when the other has come to the next backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        time.sleep(0.1 * self.global_rank)
        return loss

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("gradients", [parameter.grad for parameter in self.parameters()])


class Watched(Descends):
    """Hooks in one process look at the gradients of the first half, as those of `WandbLogger.watch` do."""

    def on_fit_start(self) -> None:
        if self.global_rank == 0:
            for parameter in self.blocks[:2].parameters():
                parameter.register_hook(lambda gradient: None)


def modules() -> None:
    silently = [type("Silently", (make, Silent), {}) for make in (LeftOut, Watched)]  # with steps in backward
    for make in (*silently, InOtherOrders, MeetsInBackward, Experts, Synced, Thawed, Quantized):
        assert_as_ddp(make)
        torch.manual_seed(0)
    assert_as_ddp(Finetuned, callbacks=partial(Finetunes, 1), max_epochs=3, num_sanity_val_steps=1)
    assert_as_ddp(Watched, accumulate_grad_batches=2, compare=assert_close_trace)
    assert_as_ddp(InTwoTurns, strategy={"k": 4, "k_prime": 2})
    assert_as_ddp(Adversaries)
    assert_as_ddp(ByOwnCode, precision="bf16-mixed")
    for make in (LeftOut, LateCritic, TwiceInOne):
        assert_as_ddp(make, precision="bf16-mixed")
    assert_as_ddp(ReadsLate, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


@pytest.mark.usefixtures("server")
def test_modules() -> None:
    in_processes([modules])


# ------------------------------------------------------------------------------------------------------- the Trainer


def evaluation() -> None:
    """Also with batches that the processes cannot share equally."""

    def drive(trainer: L.Trainer, module: Base) -> Any:
        results = [trainer.validate(module, loader(3), verbose=False), trainer.test(module, loader(3), verbose=False)]
        return [results, trainer.predict(module, loader(3))]

    assert_as_ddp(Synced, lambda trainer, module: (drive(trainer, module), fit(trainer, module)))


class OfSome(IterableDataset):
    """Batches that one of the processes alone has."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(2).dataset if dist.get_rank() == self.rank else ())


class Evaluates(Adversaries):
    """Without buffers, which DDP would send; it has something of all processes when an evaluation ends."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.note("of all", self.all_gather(torch.ones(1)))

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end


def evaluation_without_batches() -> None:
    """One of the processes has nothing to validate, test or predict."""
    for rank in range(2):
        batches = DataLoader(OfSome(rank), batch_size=4)

        def drive(trainer: L.Trainer, module: Base, batches: Any = batches) -> Any:
            trainer.fit(module, loader(), batches)
            trainer.test(module, batches, verbose=False)
            return trainer.predict(module, batches)

        assert_as_ddp(Evaluates, drive, max_epochs=2)
    skips = Evaluates()
    skips.allow_zero_length_dataloader_with_multiple_devices = True
    with pytest.raises(MisconfigurationException, match="lets a process skip an evaluation"):
        fit(trainer(streamed(), devices=2), skips)


class Adapts(Silent):
    """Evaluation steps run backward, and those of tests take optimizer steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            (self.loss(batch) * (1 + self.global_rank)).backward()
        self.note("own gradient", self.head.weight.grad)
        self.zero_grad()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)
        self.head.weight.grad = torch.ones_like(self.head.weight)
        torch.optim.SGD(self.parameters(), 0.1).step()


def backward_in_evaluation_steps() -> None:
    """Each process has gradients of its own, and takes no step with them: weights are all processes'."""
    assert_as_ddp(Adapts, use_distributed_sampler=False, inference_mode=False)
    ours = trainer(streamed(), devices=2, inference_mode=False)
    with pytest.raises(RuntimeError, match="SGD updates weights in an evaluation step"):
        ours.test(Adapts(), loader(2), verbose=False)


def averaged_weights() -> None:
    """Of Lightning's own there is one, which the owner of the weights has; the others validate with it, too.

    Some units stay on the device, where each process has a copy of their weights.
    """
    host = torch.device("cpu")
    ways = [Average, partial(StochasticWeightAveraging, 1e-2, swa_epoch_start=1, annealing_epochs=1, device=host)]
    if hasattr(callbacks, "EMAWeightAveraging"):  # not in Lightning 2.5
        ways.append(partial(callbacks.EMAWeightAveraging, decay=0.5, update_every_n_steps=1))

    def compare(*traces: Trace) -> None:  # at the end the other process has its own buffers, and no average of them
        assert_same_trace(*({k: t[k] for k in t if "end / buffer" not in k or not dist.get_rank()} for t in traces))

    for average in ways:
        assert_as_ddp(ValidatesLate, callbacks=average, max_epochs=3, compare=compare)
        with mock.patch("sp_lightning.strategy.AutoPlanner", return_value=Fixed((2,), (2, (0, 2, 4)))):
            arguments = {"strategy": {"k": "auto"}, "max_epochs": 3, "compare": compare}
            assert_as_ddp(ValidatesLate, callbacks=average, **arguments)
    again = trainer(streamed(), devices=2, callbacks=[ways[-1]()])
    for _ in range(2):  # all wait for each other as often
        fit(again, WithoutDropout())


class Prunes(callbacks.ModelPruning):
    """Resets weights to copies of the originals, as on a GPU."""

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        callbacks.ModelPruning._copy_param(new, deepcopy(old), name)


def pruning() -> None:
    assert_as_ddp(WithoutDropout, callbacks=partial(Prunes, "l1_unstructured", amount=0.3), max_epochs=3)


def checkpoints() -> None:
    """The first process writes them, all resume from them, and so does plain training in one process."""
    folder = [str(Path.cwd() / "shared")]
    dist.broadcast_object_list(folder)
    arguments = {"devices": 2, "enable_checkpointing": True}
    whole, half = WithoutDropout(), WithoutDropout()
    half.load_state_dict(whole.state_dict())
    fit(trainer(streamed(), devices=2), whole)
    kept = ModelCheckpoint(folder[0], save_last=True)
    fit(trainer(streamed(), max_epochs=1, callbacks=[kept], **arguments), half)
    resumed = WithoutDropout()
    trainer(streamed(), devices=2).fit(resumed, loader(), loader(2), ckpt_path=kept.last_model_path)
    names = [name for name, _ in whole.named_parameters()]
    for name in names:
        assert torch.equal(whole.get_parameter(name), resumed.get_parameter(name)), name
    alone = WithoutDropout()
    trainer(plain(), max_epochs=1).fit(alone, loader(), ckpt_path=kept.last_model_path)
    for name in names:
        assert torch.equal(half.get_parameter(name), alone.get_parameter(name)), name


def timeline_and_table() -> None:
    """One process draws and prints."""
    path = Path(f"timeline-{dist.get_rank()}.json")
    callback = SuperpipelineCallback(timeline=path)
    ours = trainer(SuperpipelineStrategy(k=2), devices=2, enable_model_summary=True, callbacks=[callback])
    with mock.patch.object(logging.getLogger("lightning.pytorch.utilities.rank_zero"), "info") as said:
        fit(ours, Base())
    assert path.exists() is (dist.get_rank() == 0)
    for words in ("unit loads", "2 processes train one model, 2 on this machine, one per device"):
        assert any(words in str(call) for call in said.mock_calls) is (dist.get_rank() == 0)


@pytest.mark.usefixtures("server")
def test_trainer() -> None:
    evaluations = [evaluation, evaluation_without_batches, backward_in_evaluation_steps]
    in_processes([*evaluations, averaged_weights, pruning, checkpoints, timeline_and_table])


# --------------------------------------------------------------------------------------------------------- launching

SCRIPT = """
import lightning as L
import torch

import sp_lightning


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    trainer = L.Trainer(strategy="superpipeline", accelerator="cpu", devices=2, max_steps=2, barebones=True)
    net = Net()
    trainer.fit(net, torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=2))
    print(f"process {trainer.global_rank} of {trainer.world_size}: {net.layers[0].weight.sum().item():.6f}", flush=True)
"""


def test_a_script_launches_its_processes() -> None:
    Path("train.py").write_text(SCRIPT)
    printed, _ = run_python("train.py")
    lines = re.findall(r"process (\d) of 2: (-?\d+\.\d{6})", printed)
    assert sorted(rank for rank, _ in lines) == ["0", "1"]
    assert len({total for _, total in lines}) == 1, "processes have trained apart"


def launched_by_torchrun() -> None:
    """Which tells processes who they are in these variables."""
    variables = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    with mock.patch.dict(os.environ, variables):
        ours = trainer("superpipeline", devices=2)
        assert isinstance(ours.strategy.cluster_environment, TorchElasticEnvironment)
        fit(ours, Base())
    assert (ours.world_size, ours.global_rank) == (2, dist.get_rank())


@pytest.mark.usefixtures("server")
def test_torchrun() -> None:
    in_processes([launched_by_torchrun])


@pytest.mark.parametrize("launched", [1, 2])
def test_other_numbers_of_processes_are_refused(monkeypatch: pytest.MonkeyPatch, launched: int) -> None:
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": launched, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    message = rf"TorchElasticEnvironment says that {launched} process\(es\) were launched.*asks for {3 - launched}"
    with pytest.raises(MisconfigurationException, match=message):
        trainer("superpipeline", devices=3 - launched)


def test_slurm_tasks_that_the_trainer_does_not_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    with pytest.raises(MisconfigurationException, match="SLURMEnvironment says that 4"):
        trainer("superpipeline")
