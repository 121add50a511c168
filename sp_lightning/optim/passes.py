"""Passes over weights and gradients: made from the work to be done, and run; on the CPU several threads share them.

The threads are numba's, not Python's: each of those would need Python's lock to begin, next to a thread that hardly
ever releases it. On a machine with 16 cores that took a third of the time of a step.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sp_lightning.optim.layout import (
    BLOCK,
    GROUP,
    MOMENT_NAMES,
    ParamGroup,
    State,
    fills_memory,
    flat,
    lies_like,
    make_state,
    moment_in,
)  # fmt: skip
from sp_lightning.optim.on_device import compile_for, step_on_device, together
from sp_lightning.optim.rules import NO_SCALING, Kind, Memory, Pass, Rule, Scaling, Update

_RANGE = 256 * BLOCK  # elements that are worth another thread
_LOG = logging.getLogger(__name__)
_CANNOT_COMPILE = (
    "compile its kernels",
    "set NUMBA_CACHE_DIR to a folder that can be written, on a disk with room",
)
Call: TypeAlias = Callable[[], object]

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
    group: ParamGroup = {}  # the options of its param group


def step_weights(update: Update, works: Sequence[Work]) -> None:
    """Make a step. State and kernels, which may fail, are made before the first count or weight changes."""
    if not works:
        return
    passes = passes_of(update, works)
    compile_for([step for step in passes if not step.memory.weight.is_cpu])
    calls = _calls_of(passes)
    count(works)
    for call in calls:
        call()


def passes_of(update: Update, works: Sequence[Work]) -> list[Pass]:
    """Return the passes of the step that comes next; the first step makes the state of our optimizers."""
    with_state = [
        work if work.state
        else work._replace(state=make_state(work.weight, work.group, update.moments))
        for work in works
    ]  # fmt: skip
    taken_by = [taken(work) for work in with_state]
    for work, made in zip(works, with_state, strict=True):
        work.state.update(made.state)
    numbers = torch.stack([work.state["step"] for work in works]).tolist()
    return [
        Pass(update, work.group, number + 1, *memory)
        for work, number, memory in zip(works, numbers, taken_by, strict=True)
    ]


def count(works: Sequence[Work]) -> None:
    """Count the step whose passes were made."""
    torch._foreach_add_([work.state["step"] for work in works], 1.0)


def taken(work: Work) -> tuple[Memory, Scaling]:
    """Return the memory that a pass reads and writes, and the scaling; a gradient in another layout is copied.

    Raises:
        RuntimeError: Some of it has not the layout of the weight: kernels know only addresses.
    """
    weight, gradient, state, copy, scaling, _ = work
    assert scaling is not None
    (first, first_scale), (second, second_scale) = [moment_in(state, name) for name in MOMENT_NAMES]
    if gradient is not None and gradient.shape == weight.shape and not lies_like(gradient, weight):
        gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
    memory = Memory(weight, state.get("low"), gradient, first, second, copy, first_scale, second_scale)
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
    return memory, scaling


def run(passes: Sequence[Pass]) -> None:
    """Update weights: on the CPU by kernels, on an accelerator by torch's operations."""
    for call in _calls_of(passes):
        call()


def _calls_of(passes: Sequence[Pass]) -> list[Call]:
    """Return calls that update weights: on the CPU, one of a loop for all that it can; the loops are compiled here."""
    on_device = [step for step in passes if not step.memory.weight.is_cpu]
    calls: list[Call] = [partial(step_on_device, step) for step in together(on_device)]
    copies_in_fp16: list[Call] = []
    alike: dict[tuple[Kind, Rule, Scaling, int], list[Pass]] = {}
    rules: dict[tuple[int, float], Rule] = {}
    for step in passes:
        memory = step.memory
        if not memory.weight.is_cpu:
            continue
        # kernels do not know fp16: torch casts the gradient before, and writes the copy after
        if memory.gradient.dtype == torch.float16:
            memory = memory._replace(gradient=memory.gradient.float())
        if memory.copy is not None and memory.copy.dtype == torch.float16:
            copies_in_fp16.append(partial(memory.copy.copy_, memory.weight))
            memory = memory._replace(copy=None)
        key = id(step.group), step.step
        if key not in rules:
            rules[key] = step.update.rule(step.group, step.step)
        kind = Kind.of(rules[key], step.scaling, memory)
        steps = alike.setdefault((kind, rules[key], step.scaling, step.seed), [])
        steps.append(step._replace(memory=memory))
    for (kind, rule, *_), steps in alike.items():
        loop = loop_of(compiled_kernels(), kind)
        if loop is None:
            calls += [partial(step_on_device, step) for step in steps]
        else:
            calls.append(partial(_run_loop, loop, rule, steps))
    return calls + copies_in_fp16


def _run_loop(loop: Any, rule: Rule, passes: Sequence[Pass]) -> None:
    """Update weights in one call, on as many threads as torch uses in this one, if numba has as many."""
    import numba

    ranges = [
        (row, begin, min(begin + _RANGE, size))
        for row, size in enumerate(step.memory.weight.numel() for step in passes)
        for begin in range(0, size, _RANGE)
    ]
    if not ranges:
        return
    rows = [
        [*(0 if tensor is None else tensor.data_ptr() for tensor in step.memory), step.begin]
        for step in passes
    ]  # fmt: skip
    arrays = (np.array(numbers, dtype=np.int64) for numbers in (rows, ranges))
    first = passes[0]
    # more threads would be woken, and waited for
    threads = min(len(ranges), torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    with _ONE_AT_A_TIME:
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            compiled_kernels().step_ranges(loop, rule, first.scaling, *arrays, first.seed)
        finally:
            numba.set_num_threads(before)


@cache
def loop_of(kernels: Any, kind: Kind) -> Any:
    """Return the compiled loop of a kind, or None if numba cannot make it, or there are no kernels."""
    if kernels is None:
        return None
    try:
        return kernels.compile_loop(kind)
    # numba keeps it on a disk that may be full, for example
    except Exception as error:
        _warn_that_torch_updates(*_CANNOT_COMPILE, str(error))
        return None


@cache
def compiled_kernels() -> Any:
    """Return the module of kernels, or None if numba is missing or cannot compile it.

    Before it is compiled, which would start numba's threads, a thread that ends starts them. The one that does gets
    their number for torch, too: it is OpenMP's, and OpenMP is torch's own. With another number, torch's sums would have
    other bits.
    """
    cannot = "be imported", "pip install 'sp-lightning[fast]'"
    try:
        numba = import_module("numba")  # it takes its time
        cannot = _CANNOT_COMPILE
        starter = threading.Thread(target=numba.get_num_threads)
        starter.start()
        starter.join()
        return import_module("sp_lightning.optim.kernels")
    # numba refuses versions of numpy and of Python by exceptions of several classes
    except Exception as error:
        _warn_that_torch_updates(*cannot, str(error))
        return None


@cache
def _warn_that_torch_updates(what: str, remedy: str, reason: str) -> None:
    """Say once that torch's operations update. They have the kernels' bits, except for codes."""
    _LOG.warning(
        "superpipeline: numba cannot %s (%s), so torch's own kernels update weights on the CPU. The numbers "
        "are the same, except for the rounding of int8 moments. Such an update takes 3 times as long under "
        "mixed precision, and 10 to 35 times with sp_lightning.optim over BF16 weights. For full speed: %s",
        what,
        reason,
        remedy,
    )


def add(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient, which may be in another dtype, to a sum of gradients."""
    if gradient.stride() != total.stride() or not fills_memory(total):
        total.add_(gradient)
        return
    # pieces fit into the caches of all threads, where the addition finds what the cast has written
    size = _RANGE * torch.get_num_threads()
    pieces = [torch.split(flat(tensor), size) for tensor in (total, gradient)]
    for part, added in zip(*pieces, strict=True):
        part.add_(added)
