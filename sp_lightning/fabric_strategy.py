"""The strategy of Fabric: translates its calls into those of pipelines, one for each model.

`FabricMixin` is the whole implementation, and `fabric.py` and `lightning_fabric.py` are its twins, as for the Trainer.
A loop of your own declares no steps: a step begins with a model's call, and ends with `fabric.backward`, or when an
optimizer steps (pipeline/calls/gates.py). Such a loop does not vouch for gradients either, so the optimizer updates
weights under the next forward, and not in backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from sp_lightning.arguments import StrategyWithOptions
from sp_lightning.pipeline import Pipeline, open_steps
from sp_lightning.pipeline.calls.guard import in_graphs
from sp_lightning.pipeline.optimizer.clipping import Clipping
from sp_lightning.pipeline.optimizer.kinds import why_not_by_unit
from sp_lightning.planning import AutoPlanner
from sp_lightning.trainer.checkpoint_io import (
    StateDict,
    WritesCheckpoints,
    optimizer_state_on_host,
    own_all_but_weights,
    read_from_file,
    state_dict_on_host,
)
from sp_lightning.trainer.host_memory import materialize, room_for_gradients
from sp_lightning.trainer.narrator import ToldProgress, out_of_memory_explained
from sp_lightning.trainer.precision import autocast_of, host_precision
from sp_lightning.trainer.processes import Meetings, ProcessesMixin
from sp_lightning.trainer.steps import step_of_all

if TYPE_CHECKING:
    from lightning.fabric.plugins import Precision
    from lightning.fabric.strategies.parallel import ParallelStrategy
else:
    ParallelStrategy = object


class AttachedModel(nn.Module):
    """The module that Fabric calls in place of a model, like DDP's wrapper; it has the model's weights and children.

    Only the result of `fabric.setup` holds it; when that is freed, the model is a plain one on the CPU again.
    """

    def __init__(self, pipeline: Pipeline, meetings: Meetings) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.meetings = meetings
        # the model does not become a child: names of weights stay as they are
        for contents in ("_parameters", "_buffers", "_modules"):
            vars(self)[contents] = vars(pipeline.module)[contents]
        weakref.finalize(self, _give_back, pipeline, threading.get_ident()).atexit = False

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.meetings.share_buffers(self.pipeline)
        trains = torch.is_grad_enabled()
        if trains:
            self.meetings.meet(self.pipeline)
        with out_of_memory_explained(self.pipeline, trains):
            return self.pipeline.module(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """Tell Fabric whether methods of the model may be called past this: where no process waits for another."""
        return self is other or (self.meetings.processes is None and self.pipeline.module is other)

    __hash__ = nn.Module.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the model, which is a plain one then."""
        return _itself, (self.pipeline.module,)


def _itself(model: nn.Module) -> nn.Module:
    return model


_given_up: list[Pipeline] = []  # of models that were dropped


def _give_back(pipeline: Pipeline, thread: int) -> None:
    """Give a model back; later, if Python's collector runs in a thread of the engine: detaching waits for that one."""
    _given_up.append(pipeline)
    if threading.get_ident() == thread:
        give_all_back()


def give_all_back() -> None:
    """Give all models back that were dropped."""
    while _given_up:
        _given_up.pop().detach()


class FabricMixin(StrategyWithOptions, ProcessesMixin, WritesCheckpoints, ParallelStrategy):
    """Trains models larger than GPU memory in a loop written for Lightning Fabric.

    Each model is split into units (layers, blocks), whose weights, gradients and optimizer state are in CPU memory. At
    most `k` units are on the GPU at a time. Losses, gradients and weights are those of plain training.

    `PipelineOptions` describes the options from `k` to `debug`, which hold for each model.

    Args:
        checkpoint_io: Writes and reads checkpoints. The default does so without a second copy in CPU memory.
        process_group_backend: The `torch.distributed` backend for several devices; None uses torch's default.
        timeout: How long a process waits for the others.
        set_by_lightning: Arguments that Lightning gives to every strategy; not for users. Each device has a process,
            and those of a machine share the weights.

    Raises:
        ValueError: If an argument has an invalid value.
        MisconfigurationException: If Fabric's other arguments do not work with this strategy.

    Examples:
        >>> fabric = Fabric(strategy="superpipeline", precision="bf16-mixed")
        >>> fabric = Fabric(strategy=SuperpipelineStrategy(memory_budget="12GB", activations="recompute"))
        >>> fabric.launch()
        >>> model, optimizer = fabric.setup(model, optimizer)
    """

    used_by = "Fabric"
    single_device_strategy: ClassVar[type]
    _num_nodes = 1  # set by Fabric

    @override
    def _make_parts(self) -> None:
        self.progress = ToldProgress(self.lightning)
        # by the identities of users' models, in the order in which they were set up
        self._attached: WeakValueDictionary[int, AttachedModel] = WeakValueDictionary()
        self._backward_sync_control = self  # type: ignore[assignment]

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines of all models, in the order in which these were set up."""
        return [model.pipeline for model in self._attached.values()]

    def _models_of(self, optimizer: Optimizer) -> list[AttachedModel]:
        """Return the models whose weights an optimizer steps."""
        models = self._attached.values()
        return [model for model in models if model.pipeline.optimizers.have_weights_of(optimizer)]

    def _set_world_ranks(self) -> None:
        self.num_nodes = self._num_nodes
        self.set_world_ranks()

    def _class(self) -> type:
        """Return the class that Fabric takes the strategy for: with one device it wants no `launch()`."""
        return type(self) if self.is_distributed else self.single_device_strategy

    __class__: Any = property(_class)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the strategy, which wrappers of Fabric's contain, without its models."""
        return object.__new__, (type(self),), {**vars(self), "_attached": {}}

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Open a scope for backward passes after which averages over processes are not complete yet."""
        if isinstance(module, AttachedModel) and enabled:
            return module.meetings.without_averages()
        return nullcontext()

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            host_precision(plugin, self.lightning, self)
            # Fabric sees through this, and does not forbid `loss.backward()` and `torch.autograd.grad`
            plugin.backward = wraps(type(plugin).backward)(partial(self._backward))
        self._precision = plugin

    @contextmanager
    @override
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # The base class builds models on the device: here, the innermost device counts.
        with super().module_init_context(empty_init), torch.device("cpu"):
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        if next(module.parameters(), None) is None:
            module.to(self.root_device)  # a metric, say; weights stay where they are

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        give_all_back()
        again = self._attached.pop(id(module), None)
        if again is not None:
            again.pipeline.detach()
        self.module_to_device(module)
        if next(module.parameters(), None) is None:
            return module
        meetings = Meetings(self.processes_of_a_model())
        meetings.begin_run(trains=True)
        materialize(module, meetings.follows, self.lightning, self.progress)
        with autocast_of(self.precision, self.lightning):  # as steps will have it
            pipeline = Pipeline(
                module,
                self.root_device,
                options=self.options,
                planner=AutoPlanner(),
                processes=meetings.processes,
                leaves_steps_open=True,
            )
        plan = pipeline.summary()
        units = f"{plan.units} units, of which {plan.k} are on {plan.device} at once"
        self.lightning.info(f"superpipeline: {type(module).__name__} has {units}.")
        model = self._attached[id(module)] = AttachedModel(pipeline, meetings)
        return model

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        have_limits = all(pipeline.budget is not None for pipeline in self.pipelines)
        may_wait = have_limits and not self.is_distributed and why_not_by_unit(optimizer) is None
        for pipeline in self.pipelines:
            pipeline.optimizers.check_drive(optimizer)
        has_drive = self.options.nvme_path is not None
        room = room_for_gradients([optimizer], may_wait, self.lightning, has_drive=has_drive)
        for pipeline in self.pipelines:
            pipeline.waiting.limit(room)
        return optimizer

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(self) -> AbstractContextManager[None]:
        """Open a step of all models, for code that uses their weights before any model is called in it."""
        return step_of_all(self.pipelines)

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, with which the step ends, unless the pass keeps its graph."""
        goes_on = kwargs.get("retain_graph") or kwargs.get("create_graph")
        scales = getattr(self.precision, "scaler", None) is not None
        with ExitStack() as scopes:
            scopes.enter_context(nullcontext() if goes_on else open_steps.ending())
            for pipeline in self.pipelines:
                scopes.enter_context(out_of_memory_explained(pipeline, trains=True))
                scopes.enter_context(pipeline.in_all_processes())
                if scales:
                    scopes.enter_context(pipeline.optimizers.clipping.measuring_norms())
            # the graph was built with others
            if kwargs.get("inputs") is not None and self.pipelines:
                kwargs["inputs"] = in_graphs(tree_leaves(kwargs["inputs"]))
            type(self.precision).backward(self.precision, loss, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with open_steps.ending():
            pass
        return super().optimizer_step(optimizer, **kwargs)

    def clipping_of(self, optimizer: Optimizer) -> Clipping | None:
        """Return the object that unscales and clips an optimizer's gradients; None if torch does (several models)."""
        models = self._models_of(optimizer)
        return models[0].pipeline.optimizers.clipping if len(models) == 1 else None

    @override
    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().clip_gradients_norm(*args, **kwargs).to(self.root_device)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    @override
    def get_module_state_dict(self, module: nn.Module) -> StateDict:
        return state_dict_on_host(super().get_module_state_dict(_model_in(module)))

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return optimizer_state_on_host(super().get_optimizer_state(optimizer))

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: StateDict, strict: bool = True) -> None:
        module = _model_in(module)
        attached = self._attached.get(id(module))
        others = own_all_but_weights(state_dict, module)
        # its weights are those of the first process
        if attached is not None and attached.meetings.follows:
            state_dict = others
            strict = False
        super().load_module_state_dict(module, state_dict, strict)
        if attached is not None:
            attached.pipeline.weights_changed()
            attached.meetings.meeting_due = True

    @override
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> StateDict:
        io: Any = self.checkpoint_io  # a user's own has no use for `streamed`
        parts = state if isinstance(state, dict) else {}
        io.streamed = [name for name, part in parts.items() if isinstance(part, (nn.Module, Optimizer))]
        if isinstance(state, nn.Module):
            io.streamed = dict(state.named_parameters())
        optimizers = [each for each in tree_leaves(state) if isinstance(each, Optimizer)]
        self._place_state(optimizers)
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        self._place_state(optimizers)
        for optimizer in optimizers:
            if any(model.meetings.follows for model in self._models_of(optimizer)):
                optimizer.state.clear()  # another process steps for this one
            else:
                read_from_file(optimizer)
        self.barrier()  # before any process uses the weights
        return remainder

    def _place_state(self, optimizers: Sequence[Optimizer]) -> None:
        """Have state lie on the drive, if it belongs there, before it is loaded, and after that."""
        for optimizer in optimizers:
            for model in self._models_of(optimizer):
                model.pipeline.optimizers.place_state(optimizer)

    @override
    def teardown(self) -> None:
        with ExitStack() as ends:
            ends.callback(super().teardown)
            for pipeline in self.pipelines:
                ends.callback(pipeline.detach)

    def __deepcopy__(self, memo: dict[int, Any]) -> FabricMixin:
        """Keep the strategy in copies of Fabric's wrappers, such as a model's copy for an average."""
        return self


def _model_in(module: nn.Module) -> nn.Module:
    return module.pipeline.module if isinstance(module, AttachedModel) else module
