"""Passes over weights and gradients: made from the work to be done, and run; on the CPU several threads share them.

The threads are numba's, not Python's: each of those would need Python's lock to begin, next to a thread that hardly
ever releases it. On a machine with 16 cores that took a third of the time of a step.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sp_lightning.optim.layout import (
    BLOCK,
    GROUP,
    MOMENT_NAMES,
    State,
    count_in,
    fills_memory,
    flat,
    laid_like,
    lies_like,
    make_state,
    moment_in,
)  # fmt: skip
from sp_lightning.optim.on_device import step_on_device, together
from sp_lightning.optim.rules import NO_SCALING, Kind, Memory, Pass, Rule, Scaling, Update

_RANGE = 256 * BLOCK  # elements that are worth another thread
_LOG = logging.getLogger(__name__)
# the threads that numba has where there is no OpenMP serve one caller at a time
_ONE_AT_A_TIME = threading.Lock()


class Work(NamedTuple):
    """The work of a step on one weight."""

    weight: Tensor
    # the gradient as it arrived; it is only read. None if it is on the device, where passes get it later
    gradient: Tensor | None
    # the optimizer's state of the weight; empty before it is made, and if there is none
    state: State
    copy: Tensor | None = None  # a copy of the weight in bf16, to be written
    # the scaling of the gradient before the update; None if there are too many factors
    scaling: Scaling | None = NO_SCALING


def passes_of(update: Update, group: dict[str, Any], works: Sequence[Work]) -> list[Pass]:
    """Count the step that follows, and return its passes; the first step makes the state of our optimizers."""
    if "moments" in group:  # torch's make their state themselves
        for work in works:
            if not work.state:
                work.state.update(make_state(work.weight, group, update.moments))
    taken_by = [taken(work) for work in works]
    steps = count_in([work.state for work in works])
    return [Pass(update, group, step, *each) for step, each in zip(steps, taken_by, strict=True)]


def taken(work: Work) -> tuple[Memory, Scaling]:
    """Return the memory that a pass reads and writes, and the scaling of the gradient."""
    weight, gradient, state, copy, scaling = work
    assert scaling is not None
    (first, first_scale), (second, second_scale) = [moment_in(state, name) for name in MOMENT_NAMES]
    if gradient is not None and gradient.shape == weight.shape:
        gradient = laid_like(gradient, weight)
    memory = Memory(weight, state.get("low"), gradient, first, second, copy, first_scale, second_scale)
    _check(memory)
    return memory, scaling


def _check(memory: Memory) -> None:
    """Raise unless all memory of a pass has the layout of the weight: kernels know only addresses."""
    weight = memory.weight
    in_bf16 = memory.low is not None or memory.first.dtype == torch.bfloat16
    groups = torch.Size([math.ceil(weight.numel() / GROUP)])
    is_right = (
        weight.dtype == (torch.bfloat16 if in_bf16 else torch.float32)
        and all(lies_like(tensor, weight) for tensor in memory[:6] if tensor is not None)
        and all(scales.shape == groups and scales.is_contiguous() for scales in memory[6:] if scales is not None)
    )
    if not is_right:
        raise RuntimeError(
            f"A parameter of shape {tuple(weight.shape)} has optimizer state or a gradient for another "
            "shape, dtype, device or order in memory. After a change such as `parameter.data = ...`, "
            "set its `grad` to None and make a new optimizer."
        )


def run(passes: Sequence[Pass]) -> None:
    """Update weights: on the CPU by kernels, on an accelerator by torch's operations."""
    on_host = [step for step in passes if step.memory.weight.is_cpu]
    for step in together([step for step in passes if not step.memory.weight.is_cpu]):
        step_on_device(step)
    if on_host:
        _run_kernels(list(map(_without_fp16, on_host)))
    for step in on_host:
        if _is_fp16(step.memory.copy):
            step.memory.copy.copy_(step.memory.weight)


def _is_fp16(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float16


def _without_fp16(step: Pass) -> Pass:
    """Return a pass for kernels, which do not know fp16: torch casts the gradient before, and writes the copy after."""
    gradient, copy = step.memory.gradient, step.memory.copy
    if _is_fp16(gradient):
        gradient = gradient.float()
    if _is_fp16(copy):
        copy = None
    return step._replace(memory=step.memory._replace(gradient=gradient, copy=copy))


@cache
def compiled_kernels() -> Any:
    """Return the module of kernels, or None if numba is missing or cannot be imported; the log says so once.

    Torch's operations have the same bits as the kernels, so nothing but time depends on numba.
    """
    try:
        return import_module("sp_lightning.optim.kernels")  # numba takes its time
    # numba refuses versions of numpy and of Python by exceptions of several classes
    except Exception as error:
        _LOG.warning(
            "superpipeline: numba cannot be imported (%s), so torch's own kernels update weights on the "
            "CPU. The numbers are the same, but such an update takes 3 times as long under mixed "
            "precision, and 10 to 35 times with sp_lightning.optim over BF16 weights. For full speed: "
            "pip install 'sp-lightning[fast]'",
            error,
        )
        return None


def _run_kernels(passes: Sequence[Pass]) -> None:
    """Update weights on as many threads as torch uses in this one: in one call, if all of them are of one kind."""
    kernels = compiled_kernels()
    if kernels is None:
        for step in passes:
            step_on_device(step)
        return
    alike: dict[tuple[Kind, Rule, Scaling, int], list[Pass]] = {}
    rules: dict[tuple[int, float], Rule] = {}
    for step in passes:
        key = id(step.group), step.step
        if key not in rules:
            rules[key] = step.update.rule(step.group, step.step)
        kind = Kind.of(rules[key], step.scaling, step.memory)
        alike.setdefault((kind, rules[key], step.scaling, step.seed), []).append(step)
    for (kind, rule, scaling, seed), steps in alike.items():
        ranges = [
            (row, begin, min(begin + _RANGE, size))
            for row, size in enumerate(step.memory.weight.numel() for step in steps)
            for begin in range(0, size, _RANGE)
        ]
        if not ranges:
            continue
        rows = [
            [*(0 if tensor is None else tensor.data_ptr() for tensor in step.memory), step.begin]
            for step in steps
        ]  # fmt: skip
        arrays = (np.array(numbers, dtype=np.int64) for numbers in (rows, ranges))
        # more threads would be woken, and waited for
        with _on_threads(min(len(ranges), torch.get_num_threads())):
            kernels.step_ranges(kernels.kernel_of(kind), rule, scaling, *arrays, seed)


@contextmanager
def _on_threads(count: int) -> Iterator[None]:
    """Have kernels run on this many threads in the scope, if numba has as many."""
    import numba

    with _ONE_AT_A_TIME:
        _start_threads()
        before = numba.get_num_threads()
        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
        try:
            yield
        finally:
            numba.set_num_threads(before)


@cache
def _start_threads() -> None:
    """Have numba start its threads once, in a thread that ends: the starting thread gets their number for torch, too.

    That is OpenMP's number, and OpenMP is torch's own. With another number, torch's sums would have other bits.
    """
    import numba

    starter = threading.Thread(target=numba.get_num_threads)
    starter.start()
    starter.join()


def add(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient, which may be in another dtype, to a sum of gradients."""
    for part, added in pieces(total, gradient):
        part.add_(added)


def pieces(total: Tensor, *gradients: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of all tensors that fit into the caches of all threads, where the next operation finds them."""
    strides = {gradient.stride() for gradient in gradients}
    if strides != {total.stride()} or not fills_memory(total):
        yield total, *gradients
        return
    size = _RANGE * torch.get_num_threads()
    yield from zip(*(torch.split(flat(tensor), size) for tensor in (total, *gradients)), strict=True)
