"""The Strategy: translates Lightning's contract into calls of the pipeline, and does nothing else.

`SuperpipelineMixin` is the whole implementation. Each namespace combines it with its own `ParallelStrategy` (see
`lightning.py` and `pytorch_lightning.py`), because the Trainer of one namespace refuses classes of the other.
`tests/test_strategy_hazards.py` demonstrates how Lightning's defaults go wrong for weights in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partialmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim import Optimizer
from typing_extensions import override

from sp_lightning.arguments import StrategyWithOptions
from sp_lightning.pipeline import Pipeline, Planner, readable_bytes
from sp_lightning.pipeline.host_memory import has_room_for
from sp_lightning.planning import AutoPlanner
from sp_lightning.trainer import Namespace, is_fitting
from sp_lightning.trainer.checkpoint_io import CheckpointsMixin, bytes_on_device, nbytes_of, own_all_but_weights
from sp_lightning.trainer.host_memory import (
    copy_pruned_originals,
    keep_averages_on_host,
    materialize,
    room_for_gradients,
)
from sp_lightning.trainer.narrator import CountedCopies, Narrator, ToldProgress, out_of_memory_explained
from sp_lightning.trainer.precision import PrecisionMixin, autocast_of
from sp_lightning.trainer.processes import Meetings, ProcessesMixin, meet_before_hooks
from sp_lightning.trainer.steps import SteppingPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class SuperpipelineMixin(StrategyWithOptions, ProcessesMixin, CheckpointsMixin, PrecisionMixin):  # type: ignore[misc]
    """Trains, validates, tests and predicts with models larger than GPU memory.

    The model is split into units (layers, blocks), whose weights, gradients and optimizer state are in CPU memory. At
    most `k` units are on the GPU at a time, and units are copied while others compute. Every unit is updated where this
    is fastest, and units stay on the GPU if this makes steps faster. Losses, gradients and weights are those of plain
    training.

    `PipelineOptions` describes the options from `k` to `debug`.

    Args:
        checkpoint_io: Writes and reads checkpoints. The default does so without a second copy in CPU memory.
        process_group_backend: The `torch.distributed` backend for several devices; None uses torch's default.
        timeout: How long a process waits for the others.
        set_by_lightning: Arguments that Lightning gives to every strategy; not for users. Each device has a process,
            and those of a machine share the weights.

    Raises:
        ValueError: If an argument has an invalid value.
        MisconfigurationException: If the Trainer's other arguments do not work with this strategy.

    Examples:
        >>> trainer = Trainer(strategy="superpipeline", precision="bf16-mixed")
        >>> trainer = Trainer(strategy=SuperpipelineStrategy(memory_budget="12GB", activations="recompute"))
    """

    lightning: ClassVar[Namespace]
    used_by = "Trainer"

    @override
    def _make_parts(self) -> None:
        self.pipeline: Pipeline | None = None
        self.progress = ToldProgress(self.lightning)
        self.meetings = Meetings()
        self.narrator = Narrator(self.lightning.info, self.options.k_prime, self.lightning.summary)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self._module.trainer
        if self.meetings.processes is None:
            self.meetings = Meetings(self.processes_of_a_model())
            if self.meetings.processes is not None:
                meet_before_hooks(trainer, self.lightning)
        keep_averages_on_host(trainer, self.meetings.follows, self.lightning)
        # on the CPU, plain training trains the originals as well, which several processes cannot share
        if self.root_device.type != "cpu" or self.is_distributed:
            copy_pruned_originals(trainer, self.lightning)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        # Lightning does so around all micro-batches of a step but the last one.
        return self.meetings.without_averages()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # The base class builds the whole model on the device: here, the innermost device counts.
        with super().tensor_init_context(empty_init), torch.device("cpu"):
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        # This does not call the base class, which moves the model, and then the optimizer state, to the device.
        self._detach()
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = is_fitting(trainer)
        self.meetings.begin_run(trains=fitting)
        assert self.model is not None
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        materialize(self.model, self.meetings.follows, self.lightning, self.progress)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fitting:
            with nullcontext() if self.pipeline is None else self.pipeline.plain_classes():
                self.setup_optimizers(trainer)
            if self.pipeline is not None:
                self._check_host_memory(self.pipeline, trainer.accumulate_grad_batches)
        self.setup_precision_plugin()
        self.narrator.begin(trainer, self.pipeline, list(map(str, self._plans())))

    def _check_host_memory(self, pipeline: Pipeline, micro_steps: int) -> None:
        """Check that the first step will fit host memory; gradients may have to wait, or units to stay, on the device.

        Raises:
            MisconfigurationException: It will not.
        """
        plans = self._plans()
        each_is_stepped = not self.is_distributed and micro_steps == 1
        gradients_pass = each_is_stepped and all(plan.gradients_pass for plan in plans)
        nobody_looks = all(plan.gradients_may_wait for plan in plans)
        some_wait = pipeline.budget is not None and nobody_looks and not self.is_distributed
        for optimizer in self.optimizers:
            pipeline.optimizers.check_drive(optimizer)
        room = room_for_gradients(
            self.optimizers,
            some_wait,
            self.lightning,
            gradients_pass,
            has_drive=self.options.nvme_path is not None,
            pipeline=pipeline,
            micro_steps=micro_steps,
        )
        pipeline.waiting.limit(room)

    @override
    def model_to_device(self) -> None:
        """Attach the pipeline, which moves buffers and metrics; weights stay where they are."""
        module = self._module
        if next(module.parameters(), None) is None:
            module.to(self.root_device)  # nothing to stream: metrics and buffers only
            return
        with autocast_of(self.precision_plugin, self.lightning):  # as steps will have it
            self.pipeline = Pipeline(
                module,
                self.root_device,
                options=self.options,
                planner=self.make_planner(),
                processes=self.meetings.processes,
                progress=self.progress,
            )

    def make_planner(self) -> Planner:
        """Return the planner that chooses the places of units, and the policies for activations."""
        return AutoPlanner(self.narrator.measured)

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run Lightning's own step of this name, as a step of the engine."""
        step, pipeline = getattr(super(), name), self.pipeline
        if pipeline is None:
            return step(*args, **kwargs)
        self.meetings.begin_step(pipeline)
        with (
            nullcontext() if name == "training_step" else self.meetings.evaluating(),
            out_of_memory_explained(pipeline, trains=torch.is_grad_enabled()),
            pipeline.step(),
        ):
            return step(*args, **kwargs)

    training_step = partialmethod(_step, "training_step")
    validation_step = partialmethod(_step, "validation_step")
    test_step = partialmethod(_step, "test_step")
    predict_step = partialmethod(_step, "predict_step")

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        pipeline = self.pipeline
        if pipeline is None:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        automatic = isinstance(closure, self.lightning.closure)
        with self.optimizer_scope(pipeline, self.plan_step(pipeline, optimizer, automatic)):
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def _plans(self) -> list[SteppingPlan]:
        """Return the plan for the steps of each optimizer; there are none outside of `fit`."""
        module, pipeline = self._module, self.pipeline
        if pipeline is None or not is_fitting(module.trainer):
            return []
        return [self.plan_step(pipeline, each, module.automatic_optimization) for each in self.optimizers]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # loading into a meta tensor does nothing but warn
        materialize(self._module, self.meetings.follows, self.lightning, self.progress)
        others = own_all_but_weights(checkpoint["state_dict"], self._module)
        if self.meetings.follows:  # its weights are those of the first process
            checkpoint = {**checkpoint, "state_dict": others}
            strict = False
        nbytes = nbytes_of(checkpoint["state_dict"])
        with CountedCopies(self.progress.begin("Loading weights", nbytes)):
            super().load_model_state_dict(checkpoint, strict)
        if self.pipeline is not None:
            self.pipeline.weights_changed()
            self.barrier()  # before any process uses them

    @override
    def on_train_end(self) -> None:
        self.meetings.share_weights(self.pipeline)  # the last ones may be averages
        self.narrator.end(self.pipeline)

    on_test_end = on_predict_end = on_train_end

    @override
    def on_validation_start(self) -> None:
        self.meetings.weights_may_change()  # callbacks may put averages in their place

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_end(self) -> None:
        self.meetings.share_weights(self.pipeline)  # callbacks have put the trained weights back
        if not is_fitting(self._module.trainer):
            self.narrator.end(self.pipeline)

    @override
    def teardown(self) -> None:
        if self.pipeline is not None and self.pipeline.is_forked:
            return  # a fork that ends with an exception: the run is that of another process
        # In any case, the user gets a plain module on the CPU back.
        try:
            self._detach()
        finally:
            trainer = None if self.lightning_module is None else self.lightning_module._trainer
            if self._layer_sync is not None and trainer is not None and is_fitting(trainer):
                assert self.model is not None
                self.model = self._layer_sync.revert(self.model)
            # It moves metrics, and tensors that a failed attempt to attach left behind. A tensor that is still on the
            # meta device cannot move: `setup` has raised because of it.
            with suppress(NotImplementedError), self._state_stays_without_room():
                super().teardown()

    @contextmanager
    def _state_stays_without_room(self) -> Iterator[None]:
        """Hide optimizers from Lightning, which moves their state to the host, if the host has no room for that."""
        optimizers = self.optimizers
        nbytes = bytes_on_device([optimizer.state for optimizer in optimizers])
        if has_room_for(nbytes):
            yield
            return
        self.lightning.info(
            f"superpipeline: {readable_bytes(nbytes)} of optimizer state stay in GPU memory, "
            "because CPU memory has no room for them."
        )
        self.optimizers = []
        try:
            yield
        finally:
            self.optimizers = optimizers

    def _detach(self) -> None:
        if self.pipeline is not None:
            self.pipeline.detach()
        self.pipeline = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        # threads, streams, device memory and process groups cannot leave this process
        return {**super().__getstate__(), "pipeline": None, "_stepping": None, "meetings": Meetings()}
