"""A pass as one kernel, which inductor makes of the operations of on_device.py: each number is read and written once.

There is a kernel for each way that memory lies, over any number of groups. It is compiled once, when a plan is made or
else as the first such pass runs, and inductor keeps it on disk. `torch.compile` of a function would compile again in
the middle of a step: for another default dtype, under autocast, or for tensors that share memory.

Its bits are those of torch's operations, except that a GPU may round a product and a sum once, as a fused multiply-add;
then a code that lay halfway may be the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sp_lightning.optim.layout import GROUP
from sp_lightning.optim.rules import Memory, Pass, Rule, Scaling

_LOG = logging.getLogger(__name__)
_GROUPS = 1 << 16  # groups of a piece, for whose size a kernel divides its work
# types of devices for which nothing is compiled: numba does it there, or nothing can be
_WITHOUT = {"cpu"}

Operations: TypeAlias = Callable[[Memory, Scaling, Callable[..., None], Tensor], None]
"""The operations of a kernel: all numbers are tensors, and the last one is the seed of a step."""


def run_as_one_kernel(step: Pass, operations: Operations, seed: Tensor) -> bool:
    """Run a pass over whole groups as one kernel, and tell whether there is one for it."""
    device = step.memory.weight.device
    if device.type in _WITHOUT:
        return False
    dtypes = tuple(getattr(tensor, "dtype", None) for tensor in step.memory)
    kernel = _kernel_of(operations, device, dtypes)
    if kernel is None:
        return False
    shapes = [(-1, GROUP)] * 6 + [(-1,)] * 2
    fields = zip(step.memory, shapes, strict=True)
    memory = [tensor.view(shape) for tensor, shape in fields if tensor is not None]
    numbers = (*step.update.rule(step.group, step.step), *step.scaling)
    kernel(*memory, *_on_cpu(numbers), seed)
    return True


def is_possible() -> bool:
    """Tell whether passes on a GPU are one kernel each, or no compilation has failed yet."""
    return {"cpu"} >= _WITHOUT


@lru_cache(maxsize=64)
def _on_cpu(numbers: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return numbers as tensors without a dimension on the CPU, which a kernel takes by value."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").unbind()


@cache
def _kernel_of(
    operations: Operations, device: torch.device, dtypes: tuple[torch.dtype | None, ...]
) -> Callable[..., Any] | None:
    """Return the kernel for memory of these dtypes, or None if it cannot be compiled; the log says so once."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _compile(operations, device, dtypes)
    # there is no Triton, or no compiler of C++, or another version of these
    except Exception as error:
        _WITHOUT.add(device.type)
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        _LOG.warning(
            "superpipeline: torch cannot compile updates on the GPU (%s), so each takes many kernels "
            "instead of one. The numbers are the same, but for the rounding of codes; with int8 moments "
            "an update moves 399 bytes of GPU memory for each parameter instead of 19.",
            reason,
        )
        return None


def _compile(
    operations: Operations, device: torch.device, dtypes: tuple[torch.dtype | None, ...]
) -> Callable[..., Any]:
    """Compile operations over a number of groups that is known when they run."""
    import torch._inductor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    # one group is a number of groups like others
    mode = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False))

    def example(dtype: torch.dtype, *shape: int) -> Tensor:
        with FakeTensorMode():  # without memory
            tensor = torch.empty(shape, dtype=dtype, device=device if shape else "cpu")
        sizes = [DimDynamic.DYNAMIC, DimDynamic.STATIC][: len(shape)]
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    def call(*tensors: Tensor) -> tuple[()]:
        found = iter(tensors)
        memory = Memory(*[dtype and next(found) for dtype in dtypes])
        rule = Rule(*islice(found, len(Rule._fields)))
        scaling = Scaling(*islice(found, len(Scaling._fields)))
        operations(memory, scaling, partial(_update, rule), next(found))
        return ()

    shapes = [(_GROUPS, GROUP)] * 6 + [(_GROUPS,)] * 2
    numbers = [torch.float32] * len(Rule._fields + Scaling._fields)
    examples: list[Any] = [example(dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True) if dtype]
    examples += map(example, [*numbers, torch.int32])
    with mode:
        graph = make_fx(call)(*examples)
    # a single kernel needs no processes that compile
    compiled: Callable[..., Any] = torch._inductor.compile(graph, examples, {"compile_threads": 1})
    return compiled


def _update(rule: Rule, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
    """Make a step in place by the operations of torch's fused kernels."""
    gradient = gradient + rule.penalty * weight
    change, rate = gradient - first, rule.first_rate
    first.copy_(torch.where(rate < 0.5, first + rate * change, gradient - (1 - rate) * change))
    second.mul_(rule.second_decay).add_(rule.second_rate * gradient * gradient)
    divisor = second.sqrt() / rule.correction + rule.eps
    weight.mul_(rule.decay).sub_(rule.lr * first / divisor)
