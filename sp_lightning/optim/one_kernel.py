"""A pass as one kernel, which inductor makes of the operations of on_device.py: each number is read and written once.

There is a kernel for each way that memory lies, over any number of groups. It is compiled before a step begins, and
inductor keeps it on disk. `torch.compile` of a function would compile again in the middle of a step: for another
default dtype, under autocast, or for tensors that share memory.

[Note: bits of one kernel] A GPU rounds a product and a sum once, where they are a fused multiply-add. Torch's own CUDA
kernels have such sums, too, but others. If torch has no option `division_rounding`, a quotient may be two units of its
last place away from the nearest number. So the last bits of weights differ from those of torch's operations, and a code
that lay halfway may be the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sp_lightning.optim.layout import GROUP
from sp_lightning.optim.rules import Memory, Pass, Rule, Scaling

_LOG = logging.getLogger(__name__)
_GROUPS = 1 << 16  # groups of a piece, for whose size a kernel divides its work
_SHAPES = [(-1, GROUP)] * 6 + [(-1,)] * 2  # of the memory of groups
# types of devices for which nothing is compiled: numba does it there, or nothing can be
_WITHOUT = {"cpu"}

Operations: TypeAlias = Callable[[Memory, Scaling, Callable[..., None], Tensor], None]
"""The operations of a kernel: all numbers are tensors, and the last one is the seed of a step."""

Layout: TypeAlias = tuple[torch.device, tuple[torch.dtype | None, ...]]
"""The device of memory, and the dtype of each of its fields."""

_KERNELS: dict[Layout, Callable[..., Any] | None] = {}
"""The kernels that were compiled. A layout without one was met in the middle of a step."""

# inductor's options are not for several threads
_COMPILING = threading.Lock()

_OPTIONS = {
    "compile_threads": 1,  # a single kernel needs no processes that compile
    # with several configurations of a kernel, its first launch would choose one, by the time of a tiny update
    "triton.autotune_pointwise": False,
    "deterministic": True,
    "eager_numerics.division_rounding": True,  # to the nearest number
}


def layout_of(step: Pass) -> Layout:
    """Return the layout for which the kernel of a pass is compiled."""
    dtypes = [None if tensor is None else tensor.dtype for tensor in step.memory]
    return step.memory.weight.device, tuple(dtypes)


def run_as_one_kernel(step: Pass, seed: Tensor) -> bool:
    """Run a pass over whole groups as one kernel, and tell whether there is one for it; nothing is compiled."""
    if step.memory.weight.device.type in _WITHOUT:
        return False
    kernel = _KERNELS.setdefault(layout_of(step), None)
    if kernel is None:
        return False
    fields = zip(step.memory, _SHAPES, strict=True)
    memory = [tensor.view(shape) for tensor, shape in fields if tensor is not None]
    numbers = (*step.update.rule(step.group, step.step), *step.scaling)
    kernel(*memory, *_on_cpu(numbers), seed)
    return True


def is_possible() -> bool:
    """Tell whether passes on a GPU are one kernel each, as far as is known."""
    return {"cpu"} >= _WITHOUT and None not in _KERNELS.values()


@lru_cache(maxsize=64)
def _on_cpu(numbers: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return numbers as tensors without a dimension on the CPU, which a kernel takes by value."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").unbind()


def compile_kernel(operations: Operations, layout: Layout) -> None:
    """Compile the kernel of a layout, unless it is there or cannot be compiled; the log says the latter once."""
    device, dtypes = layout
    with _COMPILING:
        if device.type in _WITHOUT or _KERNELS.get(layout) is not None:
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                _KERNELS[layout] = _compile(operations, device, dtypes)
        # there is no Triton, or no compiler of C++, or another version of these
        except Exception as error:
            _WITHOUT.add(device.type)
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            _LOG.warning(
                "superpipeline: torch cannot compile updates on the GPU (%s), so each takes many kernels "
                "instead of one. The numbers are the same, except for last bits and the rounding of codes. "
                "With int8 moments an update moves 399 bytes of GPU memory for each parameter instead of 19.",
                reason,
            )


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
    any_number: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    with FakeTensorMode():  # without memory
        as_many = torch.empty(_GROUPS, device="cpu")
    groups = mode.from_tensor(as_many, symbolic_context=any_number).shape[0]

    def example(dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a tensor that begins where its storage does, or inductor would not know that it is aligned."""
        sizes = [groups if size < 0 else size for size in shape]
        return torch.empty(sizes, dtype=dtype, device=device if shape else "cpu")

    def call(*tensors: Tensor) -> tuple[()]:
        found = iter(tensors)
        memory = Memory(*[dtype and next(found) for dtype in dtypes])
        *rule, factor, then, seed = found
        operations(memory, Scaling(factor, then), partial(_update, Rule(*rule)), seed)
        return ()

    numbers = [torch.float32] * len(Rule._fields + Scaling._fields)
    with mode:
        fields = zip(dtypes, _SHAPES, strict=True)
        examples: list[Any] = [example(dtype, *shape) for dtype, shape in fields if dtype]
        examples += map(example, [*numbers, torch.int32])
        graph = make_fx(call)(*examples)
    known = torch._inductor.list_options()
    options = {name: value for name, value in _OPTIONS.items() if name in known}
    compiled: Callable[..., Any] = torch._inductor.compile(graph, examples, options)
    return compiled


def _update(rule: Rule, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
    """Make a step in place by the operations of torch's fused kernels."""
    gradient = gradient + rule.penalty * weight
    change, rate = gradient - first, rule.first_rate
    first.copy_(torch.where(rate < 0.5, first + rate * change, gradient - (1 - rate) * change))
    second.mul_(rule.second_decay).add_(rule.second_rate * gradient * gradient)
    divisor = second.sqrt() / rule.correction + rule.eps
    weight.mul_(rule.decay).sub_(rule.lr * first / divisor)
