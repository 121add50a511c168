"""The optimizer's step over the weights of one unit, in one pass over host memory.

An optimizer steps its parameters one by one, with one pass over memory for each operation. Here the code of the user's
optimizer runs on memory of our choice. Weights that lie side by side are one tensor. If there is a cast or a copy to do
besides the update, or torch has no fused kernel, that tensor is cut into parts that stay in the cache from one
operation to the next. All bits are as after `optimizer.step()`.

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)
                       `-------------- for one part after the other, in the cache --------------'

`optimizer.state` keeps its plain form, one tensor per parameter and kind of state; these lie side by side, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from sp_lightning.pipeline.gradients.scaling import Scaling
from sp_lightning.pipeline.optimizer.flat import VECTOR_MULTIPLE, FlatState
from sp_lightning.pipeline.optimizer.runs import Candidate, Part, Run, Single, State, StepInputs, group_neighbors
from sp_lightning.pipeline.torch_private import StepCode, step_is_replaced, without_torch_function
from sp_lightning.pipeline.weights.buffers import is_dense
from sp_lightning.pipeline.weights.guard import HostParameter
from sp_lightning.pipeline.weights.sections import cuts_in

BY_ELEMENT = (Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, ASGD, Adadelta, Rprop)
"""Optimizers that treat each element by itself: exactly these classes, as subclasses may do anything."""

BY_WEIGHT = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers that treat each weight by itself, but as a whole."""

HAVE_FUSED_KERNELS = (Adam, AdamW, SGD, Adagrad)
"""Optimizers with a fused CPU kernel."""

_PART = 1 << 18  # elements for each thread: so many of a gradient, a master and a copy stay in its cache


def why_not_by_unit(optimizer: Optimizer, group: dict[str, Any], weights: Iterable[nn.Parameter]) -> str | None:
    """Return why `UnitStep` cannot step these weights of a param group; None if it can.

    Args:
        optimizer: The user's optimizer.
        group: One of its param groups.
        weights: Weights of the group.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in BY_ELEMENT + BY_WEIGHT:
        return f"{name} is not one of torch's optimizers that treat each weight by itself"
    if step_is_replaced(optimizer):
        return f"`step` of {name} was replaced"
    if type(optimizer) in BY_WEIGHT and torch.is_autocast_enabled("cpu"):
        return f"autocast is on, which casts the matrix products of {name} only in the thread that calls `step()`"
    flag = next((flag for flag in ("capturable", "differentiable") if group.get(flag)), None)
    if flag is not None:
        return f"{name} has {flag}=True"
    for weight in weights:
        with without_torch_function():
            if type(weight) not in (nn.Parameter, HostParameter):
                return f"a weight is a {type(weight).__name__}, which has operations of its own"
            if weight.device.type != "cpu" or not weight.is_floating_point() or not is_dense(weight):
                return f"a weight is not a dense tensor of real numbers on the host ({weight.dtype}, {weight.device})"
            if weight.grad is not None and weight.grad.layout is not torch.strided:
                return "a gradient is sparse"
    return None


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of all param groups."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def keeps_state(optimizer: Optimizer, settings: dict[str, Any]) -> bool:
    """Tell whether one of these optimizers keeps state of a weight.

    Args:
        optimizer: The user's optimizer.
        settings: The param group that the weight is in.
    """
    return type(optimizer) is not SGD or settings["momentum"] != 0


def has_state(optimizer: Optimizer, settings: dict[str, Any], weight: nn.Parameter) -> bool:
    """Tell whether one of these optimizers has all the state of a weight that its step needs, and so makes none.

    Args:
        optimizer: The user's optimizer.
        settings: The param group that the weight is in.
        weight: The weight.
    """
    if not keeps_state(optimizer, settings):
        return True
    return any(value is not None for value in optimizer.state.get(weight, {}).values())


@cache
def fused_kernel_works(name: str, dtype: torch.dtype) -> bool:
    """Tell whether the fused CPU kernel of a class in `torch.optim` updates weights of this dtype.

    Up to torch 2.13 that of SGD silently leaves weights in half precision as they are (pytorch#191763).
    """
    with torch.inference_mode(False), torch.no_grad():
        weight = nn.Parameter(torch.zeros(VECTOR_MULTIPLE, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        optimizer: Optimizer = getattr(torch.optim, name)([weight], lr=1.0, fused=True)
        StepCode(optimizer, optimizer.param_groups[0]).run({weight: optimizer.state[weight]})
        return bool((weight != 0).all())


class UnitStep:
    """Steps weights of a group, those of one param group in each call.

    Args:
        masters: The masters of the group, in their order in memory.
    """

    def __init__(self, masters: Sequence[Tensor]) -> None:
        self._masters = list(masters)
        self._cuts_before = [0, *accumulate(len(cuts_in(master.numel())) for master in masters)]
        self._flat_state: FlatState | None = None
        self._singles: list[Single] = []
        self._runs: list[Run] = []
        self._last_layout: list[Any] = []

    def sections(
        self,
        optimizer: Optimizer,
        settings: dict[str, Any],
        scaling: Scaling,
        inputs: StepInputs,
        wait_for_all: Callable[[], None],
    ) -> Iterator[None]:
        """Begin to update masters and state as `optimizer.step()` would.

        The caller turns gradients, inference mode and overrides of torch functions off, here and for each section.

        Args:
            optimizer: The user's optimizer. Neither its param groups nor its `state` are read.
            settings: The param group without its parameters, as it was when the user's `step` was called.
            scaling: Unscaling and clipping of the gradients before the update.
            inputs: Gradient, state and lowered copy of each master.
            wait_for_all: Waits until all gradients have landed, not only those of the next section.

        Returns:
            An iterator each of whose steps updates one section (sections.py).
        """
        update = _Update(optimizer, settings, scaling.without_ones())
        self._find_runs(update, inputs)
        if any(single.has_sections for single in self._singles):
            wait_for_all()
        singles = (single.part(inputs) for single in self._singles)
        parts = (part for run in self._runs for part in run.parts(update.limit_for(run)))
        sections: list[list[Part]] = [[] for _ in range(self._cuts_before[-1] + 1)]
        for part in chain(singles, parts):
            sections[part.section].append(part)
        runs = self._runs  # another param group's step may find others before this one ends

        def finish() -> None:
            for run in runs:
                run.finish(inputs.states)
            increment_version(m for m, g in zip(self._masters, inputs.gradients, strict=True) if g is not None)

        return _step_sections(update, sections, finish)

    def _find_runs(self, update: _Update, inputs: StepInputs) -> None:
        """Find what can be stepped as one, unless everything lies where it lay in the last call."""
        layout = self._layout(update, inputs)
        if self._last_layout == layout and all(run.numbers_agree() for run in self._runs):
            return
        memories = [master.data for master in self._masters]
        if self._flat_state is None or not self._flat_state.is_for(memories, inputs.states):
            self._flat_state = FlatState(memories)
        candidates = [
            self._candidate(index, memory, gradient, state, copy, update)
            for index, (memory, gradient, state, copy) in enumerate(zip(memories, *inputs, strict=True))
            if gradient is not None
        ]
        self._singles, self._runs = [], []
        for neighbors in group_neighbors(candidates):
            first = neighbors[0]
            is_cut = first.has_sections or first.memory.numel() > update.limit
            if len(neighbors) > 1 or (is_cut and first.state_signature is not None):
                self._runs.append(Run(neighbors, inputs.states, self._flat_state))
            else:
                self._singles.append(Single(first))
        makes_state = any(candidate.is_first_step for candidate in candidates)
        # state that is forgotten after a first step, and made once more, must not be made where it was
        self._last_layout = [] if makes_state else self._layout(update, inputs)

    def _candidate(
        self, index: int, memory: Tensor, gradient: Tensor, state: State, copy: Tensor | None, update: _Update
    ) -> Candidate:
        for what, tensor in (("gradient", gradient), ("lowered copy", copy)):
            if tensor is not None and not _is_like(tensor, memory):
                raise ValueError(
                    f"The {what} of weight {index} has shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
                    f"{tensor.device}; the weight has {tuple(memory.shape)} and {memory.stride()} on {memory.device}."
                )
        master = self._masters[index]
        state = {key: value for key, value in state.items() if value is not None}
        is_first_step = update.keeps_state and not state
        section = self._cuts_before[index]
        return Candidate(index, master, memory, gradient, copy, state, is_first_step, update.is_by_element, section)

    def _layout(self, update: _Update, inputs: StepInputs) -> list[Any]:
        """Return the addresses of all tensors, and all else that decides what can be stepped as one."""
        state_values = chain.from_iterable(state.values() for state in inputs.states)
        return [
            update.limit,
            update.keeps_state,
            [master.data_ptr() for master in self._masters],
            [tensor if tensor is None else (tensor.data_ptr(), tensor.dtype) for tensor in inputs.gradients],
            [tensor if tensor is None else (tensor.data_ptr(), tensor.dtype) for tensor in inputs.copies],
            [value.data_ptr() if isinstance(value, Tensor) else id(value) for value in state_values],
        ]


def _step_sections(update: _Update, sections: Sequence[Iterable[Part]], finish: Callable[[], None]) -> Iterator[None]:
    *before_last, last = sections
    for section in before_last:
        update.run_all(section)
        yield
    update.run_all(last)
    finish()
    yield


def _is_like(tensor: Tensor, memory: Tensor) -> bool:
    return tensor.shape == memory.shape and tensor.stride() == memory.stride() and tensor.device == memory.device


class _Update:
    """Runs the code of the user's optimizer on parameters of our choice, and what goes before and after it."""

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any], scaling: Scaling) -> None:
        # for two threads at least: in smaller parts the time that Python takes between them would show
        self.limit = _PART * max(2, torch.get_num_threads())
        self.is_by_element = type(optimizer) in BY_ELEMENT
        self.keeps_state = keeps_state(optimizer, settings)
        self._scaling = scaling
        self._is_fused = bool(settings.get("fused"))
        self._code = StepCode(optimizer, settings.copy())
        self._scratch: dict[torch.dtype, Tensor] = {}  # the same memory for one batch after the other: it stays cached
        self._scratch_used = 0

    def limit_for(self, run: Run) -> int | None:
        """Return the size of a run's parts; None not to cut it: scaling alone gains less by it than each part costs."""
        return None if self._is_fused and run.is_only_updated else self.limit

    def run_all(self, parts: Iterable[Part]) -> None:
        """Update these parts, batch by batch."""
        for batch in self._batches(parts):
            self._run(batch)

    def _batches(self, parts: Iterable[Part]) -> Iterator[list[Part]]:
        """Group parts into batches, one for each call of the optimizer's code, that stay in the cache until done."""
        batch: list[Part] = []
        size = 0
        for part in parts:
            in_cache = 0 if self._is_fused and part.is_only_updated else part.parameter.numel()
            # first steps apart: the fused kernel of SGD wants momentum buffers for all of its parameters, or for none
            if batch and (size + in_cache > self.limit or (part.store_state is None) != (batch[0].store_state is None)):
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += in_cache
        if batch:
            yield batch

    def _run(self, parts: Sequence[Part]) -> None:
        """Cast and scale the gradients, update, and write copies."""
        self._scratch_used = 0
        for part in parts:
            gradient = self._cast(part.gradient, part.parameter.dtype)
            self._scaling.apply_(gradient)
            part.parameter.grad = gradient
        self._code.run({part.parameter: part.state for part in parts})
        for part in parts:
            if part.copy is not None:
                part.copy.copy_(part.parameter)
            if part.store_state is not None:
                part.store_state()

    def _cast(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        if gradient.dtype == dtype:
            return gradient
        if self._scratch_used + gradient.numel() > self.limit:
            return gradient.to(dtype)
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(self.limit, dtype=dtype)
        start = self._scratch_used
        self._scratch_used += gradient.numel()
        return self._scratch[dtype].as_strided(gradient.size(), gradient.stride(), start).copy_(gradient)
