"""The data that host memory has to hold: a model from the meta device, averages of weights, the optimizer's state.

Units stay on the GPU from the first step on if host memory has no room for their state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, Optimizer

from sp_lightning.optim.dry_step import state_after_dry_step
from sp_lightning.optim.optimizers import AdamW
from sp_lightning.pipeline import Pipeline, Progress, WindowPlan, available_host_memory, readable_bytes
from sp_lightning.pipeline.optimizer.kinds import BY_ELEMENT, BY_WEIGHT
from sp_lightning.pipeline.torch_private import step_is_replaced
from sp_lightning.planning.measure import may_live_on_device, work_of
from sp_lightning.planning.memory import bytes_meanwhile, bytes_that_stay, first_choice, first_host_bytes
from sp_lightning.planning.work import Workload
from sp_lightning.trainer import FabricNamespace, Namespace

# the part of all gradients that is on the host at once, if each is used as it comes
_PASSING = 0.2


def materialize(
    module: nn.Module,
    follows: bool,
    lightning: FabricNamespace,
    progress: Progress,
) -> None:
    """Give every meta tensor of `module` memory on the CPU and have its owner fill it with `reset_parameters`.

    Parameter objects are kept (optimizers may already hold them), and so are ties: a weight shared by two modules is
    filled by the first one in `named_modules`. A process that `follows` gets its weights from another one: it fills
    them, as random numbers go on from there, but lets go of the memory.
    """
    modules = list(module.named_modules())
    nbytes = sum(tensor.nbytes for _, owner in modules for tensor in _meta_tensors(owner))
    work = progress.begin("Initializing weights", nbytes)
    for name, owner in modules:
        tensors = _meta_tensors(owner)
        if not tensors:
            continue
        # torch.nn.MultiheadAttention is the only layer of torch whose method has an underscore.
        reset: Any = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
        lightning.check(
            callable(reset),
            f"`{name or 'the model'}` ({type(owner).__name__}) has weights or buffers on the "
            "meta device and no `reset_parameters()` to fill them. Define that method, or "
            "build this module without `torch.device('meta')`.",
        )
        _fill(tensors, reset)
        for parameter in [tensor for tensor in tensors if follows and isinstance(tensor, nn.Parameter)]:
            # it takes no memory before it is written to
            parameter.data = torch.empty_like(parameter)
        work.advance(_nbytes(tensors))


def _meta_tensors(owner: nn.Module) -> list[Tensor]:
    return [t for t in (*owner.parameters(recurse=False), *owner.buffers(recurse=False)) if t.is_meta]


def _fill(tensors: Sequence[Tensor], reset: Callable[[], object]) -> None:
    """Give meta tensors memory, and have it filled; after an exception they are meta tensors, to be filled again."""
    memories: list[Tensor] = []
    try:
        for tensor in tensors:
            memory = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
            memories.append(memory)
            # `.data = ` refuses to turn a meta tensor into a real one.
            torch.utils.swap_tensors(tensor, memory)  # type: ignore[no-untyped-call]
        reset()
    except BaseException:
        for tensor, memory in zip(tensors, memories, strict=False):
            if memory.is_meta:
                torch.utils.swap_tensors(tensor, memory)  # type: ignore[no-untyped-call]
        raise


def copy_pruned_originals(trainer: Any, lightning: Namespace) -> None:
    """Have `ModelPruning` write copies of the originals that it saves into the weights that it resets.

    Lightning makes the copy by moving an original to the device. Weights are on the host, where that is the original
    itself, and training would change it.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, lightning.pruning):
            callback._copy_param = partial(_copy_values, type(callback)._copy_param)


def _copy_values(
    copy_param: Callable[..., None],
    new: nn.Module,
    original: nn.Module,
    name: str,
) -> None:
    memories = [(parameter, parameter.data) for parameter in new.parameters(recurse=False)]
    copy_param(new, deepcopy(original), name)
    for parameter, memory in memories:  # others may share it
        parameter.data = memory.copy_(parameter.data)


def keep_averages_on_host(trainer: Any, follows: bool, lightning: Namespace) -> None:
    """Have callbacks that average weights keep their copy of the model, which `setup` makes, where its weights are.

    If processes share weights, only the process that owns them averages; those that follow it do not.
    """
    for callback in [each for each in trainer.callbacks if isinstance(each, lightning.averaging)]:
        chosen = callback._device
        lightning.check(
            chosen is None or torch.device(chosen).type == "cpu",
            f"`{type(callback).__name__}(device={chosen!r})` keeps a second copy of the whole "
            "model on the GPU, but `strategy='superpipeline'` keeps weights in CPU memory. Leave "
            "`device` out, or set it to 'cpu'.",
        )
        # Lightning would take the module's `device`, where no weight is
        callback._device = torch.device("cpu")
        if isinstance(callback, lightning.swa):
            if follows:
                callback.transfer_weights = lambda *_: None  # it steers epochs as well, so it stays
        elif follows:
            own = _OwnBuffers()
            trainer.callbacks[trainer.callbacks.index(callback)] = lightning.lambda_callback(
                on_validation_epoch_start=own.keep, on_validation_epoch_end=own.put_back
            )


class _OwnBuffers:
    """The buffers of a process that follows, while it validates with the buffers that the first one has averaged.

    Afterwards it goes on with its own, as under DDP, where each process has swapped them with an average.
    """

    _kept: list[Tensor]

    def keep(self, _: Any, module: nn.Module) -> None:
        self._kept = [buffer.clone() for buffer in module.buffers()]

    def put_back(self, _: Any, module: nn.Module) -> None:
        for buffer, kept in zip(module.buffers(), self._kept, strict=True):
            buffer.copy_(kept)


def room_for_gradients(
    optimizers: Sequence[Optimizer],
    some_may_wait: bool,
    lightning: FabricNamespace,
    gradients_pass: bool = False,
    has_drive: bool = False,
    pipeline: Pipeline | None = None,
    micro_steps: int = 1,
) -> float:
    """Return the host memory that gradients may take besides the state of optimizers; infinite if all of them fit.

    It is checked before the first step makes any state: if memory runs out, the system ends the process without an
    error.

    Args:
        optimizers: The optimizers, before their first step.
        some_may_wait: Whether gradients may wait on the device if there is room.
        lightning: The namespace whose error is raised.
        gradients_pass: Whether gradients are used as they come, and never wait for all others.
        has_drive: Whether a drive holds the state for which there is no room.
        pipeline: The pipeline whose units may stay on the device, where there is too little room; None if they may not.
        micro_steps: Number of batches in a step.

    Raises:
        MisconfigurationException: Gradients and optimizer state do not fit.
    """
    share = _PASSING if gradients_pass else 1.0
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    free = available_host_memory()
    gradients = int(share * sum(_nbytes(_trained(group)) for group in groups))
    state = 0 if has_drive else sum(map(state_bytes, optimizers))
    if free is None or gradients + state <= free:
        return math.inf
    if some_may_wait and _PASSING * gradients + state <= free:
        return free - state
    room = None
    if pipeline is not None:
        room = keep_units_on_device(pipeline, optimizers, gradients_pass, some_may_wait, micro_steps)
    if room is None:
        names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        raise lightning.misconfiguration(
            f"{names} would keep {readable_bytes(state)} of optimizer state in CPU memory, and "
            f"{readable_bytes(gradients)} of gradients, but only {readable_bytes(free)} are "
            "free. Use a machine with more memory, freeze weights, or use "
            "`sp_lightning.optim.AdamW(moments='int8')` with `precision='bf16-true'`. This "
            "needs half as much as AdamW in FP32. `sp-lightning plan` shows what fits."
        )
    return room


def keep_units_on_device(
    pipeline: Pipeline,
    optimizers: Sequence[Optimizer],
    gradients_pass: bool,
    some_may_wait: bool,
    micro_steps: int,
) -> float | None:
    """Keep as few units on the device as CPU memory requires; return the CPU memory that gradients may take then.

    Before the planner has measured steps, all units stream, and their optimizer state is in CPU memory. Where that is
    too small, units are on the GPU from the start, and all later plans keep them there. Activations are not measured
    yet, so all other device memory is left to them. None if it does not fit.
    """
    if pipeline.processes is not None or pipeline.options.optimizer_on != "auto":
        return None
    device_room, free = pipeline.budget, available_host_memory()
    if device_room is None or free is None:
        return None
    on_accelerator = optimizers if pipeline.device.type != "cpu" else ()
    works = []
    for unit in (*pipeline.arrangement.units, pipeline.arrangement.resident):
        masters = [weight.master for weight in unit.every_weight]
        state = sum(state_bytes(optimizer, masters) for optimizer in optimizers)  # that the first step will make
        lives = may_live_on_device(optimizers, masters)
        works.append(work_of(unit, state, *bytes_meanwhile(on_accelerator, masters), lives=lives))
    workload = Workload(
        units=tuple(works[:-1]),
        resident=works[-1],
        stepping="in backward" if gradients_pass else "after backward",
        micro_steps=micro_steps,
        adds_up=micro_steps > 1,
        may_wait=some_may_wait,
        may_stay=True,
    )
    host_room = free + sum(work.host_bytes - work.state_bytes for work in works)
    first = first_choice(workload, device_room, host_room)
    if first_host_bytes(workload, first) > host_room:
        return None
    if first.living:
        on_device_bytes = bytes_that_stay(workload.numbered(first.living))
        plan = WindowPlan(first.k, on_device=workload.names(first.living), on_device_bytes=on_device_bytes)
        pipeline.keep_on_device(plan)
    if gradients_pass or not some_may_wait:
        return math.inf
    return host_room - sum(work.host_bytes for work in workload.kept_on_host(first).values())


def state_bytes(optimizer: Optimizer, among: Collection[Tensor] | None = None) -> int:
    """Return the bytes of state that an optimizer has yet to make; 0 if that is not known.

    It is the state of all its weights, or of those `among` some. Torch's own classes show it by a step on the meta
    device, with any options.
    """
    if optimizer.state:
        return 0
    counted = None if among is None else set(map(id, among))
    groups = [
        {**group, "params": [weight for weight in _trained(group) if counted is None or id(weight) in counted]}
        for group in optimizer.param_groups
    ]
    if isinstance(optimizer, AdamW):
        return sum(map(optimizer.state_bytes, groups))
    if type(optimizer) not in (*BY_ELEMENT, *BY_WEIGHT, ASGD) or step_is_replaced(optimizer):
        # the code of a user's own step may do anything, and would run once more than in plain training
        return 0
    nbytes = 0
    for group in groups:  # weights of one kind have state of one size
        kinds = Counter((weight.dtype, weight.shape, weight.stride()) for weight in group["params"])
        for (dtype, shape, stride), count in kinds.items():
            weight = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            nbytes += count * _nbytes(state_after_dry_step(type(optimizer), [{**group, "params": [weight]}]) or [])
    return nbytes


def _trained(group: dict[str, Any]) -> list[Tensor]:
    """Return the weights of a group that have gradients and state in host memory."""
    return [weight for weight in group["params"] if weight.requires_grad and weight.device.type == "cpu"]


def _nbytes(weights: Sequence[Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)
