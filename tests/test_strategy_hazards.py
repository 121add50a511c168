"""One test or more for each way in which Lightning's defaults go wrong for weights in host memory.

What needs a device is tested with one that only pretends: `meta`, and an engine that does nothing.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

import sp_lightning.strategy
from sp_lightning import SuperpipelineStrategy
from sp_lightning.pipeline import Pipeline, PipelineOptions

from .helpers import slow_host
from .lightning_modules import WIDTH, Base, Notes, assert_plain, assert_same_training, fit, loader, streamed, trainer
from .pipeline.parts import RecordingBackend

DEVICE = torch.device("meta")


class Pretended(SuperpipelineStrategy):
    """The strategy as it would be set up for a device: everything of the device is done but the computing."""

    def __init__(self, module: L.LightningModule, **arguments: Any) -> None:
        arguments = {"accelerator": mock.Mock(), "cluster_environment": mock.Mock(), **arguments}
        super().__init__(parallel_devices=[DEVICE], **arguments)
        self.connect(module)
        module._trainer = SimpleNamespace(
            state=SimpleNamespace(fn=TrainerFn.TESTING),
            callbacks=[],
            loggers=[],
            progress_bar_callback=None,
            is_global_zero=False,  # nothing is reported
        )

    def set_up(self) -> None:
        with mock.patch.object(sp_lightning.strategy, "Pipeline"):
            self.setup(self.lightning_module._trainer)


@pytest.fixture
def module() -> Base:
    return Base()


def test_hazard_01_the_module_names_the_compute_device():
    module = L.LightningModule()
    module.layer = nn.Linear(2, 2)
    pipeline = Pipeline(module, "meta", backend=RecordingBackend())
    assert module.device == torch.device("meta")
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    pipeline.detach()
    assert module.device == torch.device("cpu")


def test_hazard_02_metrics_move_without_the_networks_inside_of_them():
    class Learned(torchmetrics.MeanMetric):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(2, 2)

    module = nn.Sequential(nn.Linear(2, 2))
    module.learned = Learned()
    module.collection = torchmetrics.MetricCollection({"a": torchmetrics.MeanMetric()})
    weight = module.learned.network.weight
    pipeline = Pipeline(module, "meta:0", backend=RecordingBackend())
    assert module.learned.mean_value.is_meta
    assert module.learned.device.type == "meta"
    assert module.collection["a"].mean_value.is_meta
    assert module.learned.network.weight is weight
    assert not weight.is_meta
    del module.learned, module.collection  # metrics cannot come back from a pretended device
    pipeline.detach()


def test_hazard_03_models_are_built_on_the_host(module):
    strategy = Pretended(module)
    with strategy.tensor_init_context():
        assert torch.empty(0).device.type == "cpu"
    with strategy.tensor_init_context(empty_init=True), mock.patch("torch.Tensor.uniform_") as uniform:
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    uniform.assert_not_called()


class Early(Base):
    """05: parameters are the same objects. LightningCLI builds the optimizer before `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.AdamW(self.parameters(), 0.01)
        self.objects = [id(p) for p in self.parameters()]

    def configure_optimizers(self) -> Any:
        return self.early

    def on_train_batch_end(self, *_: Any) -> None:
        assert [id(p) for p in self.parameters()] == self.objects


class Zeroing(Base):
    """20: gradients are set to zeros, or to None."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)


@pytest.mark.parametrize("make", [Early, Zeroing])
def test_training_is_the_same(make):
    assert_same_training(make)


AVERAGING = [partial(callbacks.StochasticWeightAveraging, 0.1)]
if hasattr(callbacks, "WeightAveraging"):
    AVERAGING += [callbacks.WeightAveraging, callbacks.EMAWeightAveraging]


@pytest.mark.parametrize("average", AVERAGING)
def test_hazard_09_averages_lie_where_the_weights_are(module, average):
    """By default Lightning puts them on the device, on which they are refused before any copy."""
    strategy = Pretended(module)
    callback = average(device=None)
    module._trainer.callbacks = [callback]
    strategy.setup_environment()
    assert callback._device == torch.device("cpu")
    module._trainer.callbacks = [average(device="cuda")]
    with pytest.raises(MisconfigurationException, match=r"Averaging\(device=.*cuda.*\)` keeps .* Leave `device` out"):
        strategy.setup_environment()


def test_pruning_copies_the_originals_that_it_has_saved(module):
    """As it does on a GPU, where it moves them to the device; with weights on the host training would change them."""
    strategy, callback = Pretended(module), callbacks.ModelPruning("l1_unstructured", amount=0.5)
    module._trainer.callbacks = [callback]
    strategy.setup_environment()
    new, original = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    callback._copy_param(new, original, "weight")
    assert torch.equal(new.weight, original.weight)
    assert new.weight.data_ptr() != original.weight.data_ptr()


def test_hazard_10_the_strategy_can_be_pickled_while_attached():
    class Pickling(callbacks.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert trainer.strategy.pipeline is not None
            copied = pickle.loads(pickle.dumps(trainer.strategy))
            assert copied.pipeline is None
            assert copied.options == trainer.strategy.options

    fit(trainer(streamed(), callbacks=Pickling()), Base())


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_hazard_12_batch_size_finder_retries_without_teardown(place, monkeypatch):
    """It drops all callbacks, runs the fit loop inside of a hook, and restores the weights from a file."""
    # seconds for what all tests together have made, and nothing here is left to the collector
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)

    class Large(Base):
        batch_size, rows = 2, 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.rows = len(batch[0])
            return super().training_step(batch, batch_idx)

        def fail(self, where: str) -> None:
            if self.rows > 4 and where == place:
                raise RuntimeError("CUDA out of memory.")

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](x))
            self.fail("forward")
            if x.requires_grad:
                x.register_hook(lambda gradient: self.fail("backward"))
            return self.head(self.blocks[3](self.blocks[2](x)))

        def train_dataloader(self) -> Any:
            return loader(batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return loader(2)

    def drive(trainer: L.Trainer, module: Large) -> Any:
        size = Tuner(trainer).scale_batch_size(module, mode="power", steps_per_trial=1, max_trials=4)
        assert size == 4
        trainer.fit(module)

    assert_same_training(Large, drive)


# Hazards 05, 08 and 13, weights that are assigned, written to or loaded, and 19, requires_grad, are in
# test_exact_random_stories.py; 06, gradients that are looked at, and 12, exceptions, in test_overlap.py; 18, hooks on
# parameters, there and in the zoo; 10, copies, in test_exact_mechanisms.py; 07, inference tensors, and 21, clipping,
# are among the Trainer's arguments in test_strategy.py; 16, mixed precision, is in test_precision.py; 22, the memory
# that checkpoints take, in test_checkpoint.py; 24, more than one process, in test_processes.py; 25, a compiled
# LightningModule, in test_strategy.py.


def test_hazard_26_ranks_without_a_question_to_the_cluster(monkeypatch):
    """SLURM_NODEID, SLURM_PROCID and SLURM_LOCALID are missing in an interactive shell."""
    ours = trainer(streamed(cluster_environment=SLURMEnvironment(auto_requeue=False)))
    assert (ours.global_rank, ours.local_rank, ours.node_rank, ours.world_size) == (0, 0, 0, 1)
    assert ours.is_global_zero
    assert not ours.strategy.is_distributed
    assert ours.strategy.global_rank == 0
    fit(ours, Base())


def test_hazard_27_notebooks(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    ours = trainer("superpipeline")
    assert ours.strategy.launcher is None
    fit(ours, Base())
    assert not torch.distributed.is_initialized()


def test_hazard_28_a_mac_trains_on_its_cpu_if_it_is_told_to(monkeypatch):
    """Lightning refuses any parallel strategy object on MPS by itself, and chooses MPS by default."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    fit(trainer(streamed()), Base())
    for accelerator in ("mps", "auto"):
        with pytest.raises(ValueError, match="not supported on the MPS accelerator"):
            trainer(streamed(), accelerator=accelerator)


# Hazards 15 and 23, fused kernels, are in tests/pipeline/optimizer/test_fused.py.


def test_meta_modules_are_built_on_the_host():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, WIDTH)
            self.output = nn.Linear(WIDTH, 5, bias=False)
            self.output.weight = self.embedding.weight
            self.attention = nn.MultiheadAttention(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(self.embedding(x))

    class Meta(Base):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.tied = Tied()
                self.norm = nn.BatchNorm1d(WIDTH)
            self.early = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            return self.early

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + self.tied(batch[1]).mean() + self.norm(batch[0]).square().mean()

    module = Meta()
    fit(trainer(streamed(), max_epochs=1), module)
    assert module.tied.output.weight is module.tied.embedding.weight
    assert any(p is module.tied.output.weight for p in module.early.param_groups[0]["params"])
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in module.parameters())
    assert module.norm.running_var.isfinite().all()


def test_meta_modules_without_reset_parameters_are_named():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, device="meta"))

    module = Base()
    module.inner = nn.Sequential(Bare())
    with pytest.raises(
        MisconfigurationException, match=r"`inner\.0` \(Bare\) has weights .* no `reset_parameters\(\)`"
    ):
        fit(trainer(streamed()), module)
    for block in module.blocks:
        assert_plain(block)


def test_arguments_are_the_engines_options():
    """Which check them before any work (tests/pipeline/test_options.py)."""
    options = {"k": 3, "k_prime": 2, "memory_budget": "1GB", "units": ["Block"], "resident": ["head"], "debug": True,
               "activations": "keep", "overlap_optimizer": False, "pin_memory": False, "host_threads": 2,
               "compile": True, "optimizer_on": "host", "nvme_path": "/scratch"}  # fmt: skip
    assert {field.name for field in fields(PipelineOptions)} == set(options)
    assert SuperpipelineStrategy(**options).options == PipelineOptions(**options)
    with pytest.raises(ValueError, match="k=0"):
        SuperpipelineStrategy(k=0)


# What Lightning's own tests, run with the strategy in place of its default one, have found.


@pytest.mark.parametrize("hook", ["setup", "loss"], ids=["before the pipeline", "with the pipeline"])
def test_exceptions_reach_lightnings_on_exception(hook):
    error = RuntimeError("the user's")
    module = Base()
    setattr(module, hook, mock.Mock(side_effect=error))
    with mock.patch.object(Strategy, "on_exception") as told, pytest.raises(RuntimeError, match="the user's"):
        fit(trainer(streamed()), module)
    told.assert_called_once_with(error)
    assert_plain(module)


def test_a_logger_that_draws_the_graph_of_the_model():
    """As `TensorBoardLogger(log_graph=True)`: the error says what can be drawn."""

    class Draws(Notes):
        def log_graph(self, model, input_array=None):
            torch.jit.trace(model, torch.ones(2, WIDTH), check_trace=False)

    with pytest.raises(RuntimeError, match=r"captured as a graph.*`copy\.deepcopy\(module\)\.cpu\(\)`"):
        fit(trainer(streamed(), logger=Draws()), Base())


@pytest.mark.parametrize("hook", ["training_step", "on_after_backward"])
def test_a_fork_that_ends_in_a_hook(hook):
    class Forks(Base):
        child = -1

    def fork_once(self: Forks, *args: Any) -> Any:
        if self.global_step == 2 and self.child == -1:
            self.child = os.fork()
            if not self.child:
                sys.exit(7)
        return getattr(Base, hook)(self, *args)

    setattr(Forks, hook, fork_once)
    module, process = Forks(), os.getpid()
    try:
        with slow_host():
            fit(trainer(streamed()), module)
    except BaseException as error:
        if os.getpid() == process:
            raise
        os._exit(error.code if isinstance(error, SystemExit) else 1)
    has_ended, _, _ = select.select([os.pidfd_open(module.child)], [], [], 20)
    os.kill(module.child, signal.SIGKILL)
    assert (bool(has_ended), os.waitstatus_to_exitcode(os.waitpid(module.child, 0)[1])) == (True, 7)
