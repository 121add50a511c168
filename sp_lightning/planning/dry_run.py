"""A dry run of a model's forward: counts what each unit would compute, and what autograd would save.

Tensors have shapes and dtypes but no values, so a model of any size takes seconds, without its weights and without the
device. `estimate.py` turns the counts into a workload.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from sp_lightning.pipeline._private import storage_key, without_values
from sp_lightning.pipeline.activations.footprint import Footprint
from sp_lightning.pipeline.activations.offload import MIN_OFFLOAD_BYTES
from sp_lightning.pipeline.weights.units import Division


@dataclass
class Seen:
    """Counts for the calls of one unit, or for everything outside of units.

    Attributes:
        flops: Floating-point operations.
        inputs: Bytes of its inputs: recomputing has to keep them.
        saved: Bytes that autograd saved besides.
        large: The part of both that is in tensors large enough to be offloaded.
        large_inputs: The part of it that is inputs.
    """

    flops: int = 0
    inputs: int = 0
    saved: int = 0
    large: int = 0
    large_inputs: int = 0

    @property
    def footprint(self) -> Footprint:
        """What the calls take on the device for backward."""
        everything = self.inputs + self.saved
        return Footprint(self.inputs, self.saved, self.large, everything, True, self.large_inputs)


@dataclass
class DryRun:
    """Counts for one forward.

    Attributes:
        units: Counts for each unit, in the order of the division.
        outside: Counts for everything outside of units.
        calls: Number of the unit of each call, in order.
    """

    units: list[Seen]
    outside: Seen = field(default_factory=Seen)
    calls: list[int] = field(default_factory=list)


class CannotFollow(ValueError):
    """Raised when a forward needs values, or does not accept these inputs."""


def shapes_of(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy a module to the meta device, where it takes no memory.

    Args:
        module: The module, on any device; it stays as it is.
        dtype: The dtype that floating-point parameters and buffers are converted to; `None` leaves them.
    """

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)

    return _copy_with(module, on_meta)


def dry_run(module: nn.Module, division: Division, inputs: Any, autocast: torch.dtype | None) -> DryRun:
    """Follow one forward of a module in training mode.

    Args:
        module: The module, on the meta device. A copy of it is called, not the module itself.
        division: Its units. A weight is taken in its `compute_dtype`.
        inputs: Its inputs: a tuple is unpacked into positional arguments, a dictionary into keyword arguments. Only
            shapes and dtypes of tensors matter, so they may be on the meta device.
        autocast: The dtype of autocast, if it is on.

    Raises:
        CannotFollow: If the forward raises, because it needs values or does not accept these inputs.
    """
    dtypes = {id(weight.master): weight.compute_dtype for unit in division.units for weight in unit.weights}
    mode = without_values()

    def without_memory(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=dtypes.get(id(tensor), tensor.dtype))

    copied = _copy_with(module, without_memory).train()
    arguments = tree_map(lambda leaf: without_memory(leaf) if isinstance(leaf, Tensor) else leaf, _as_arguments(inputs))
    unit_of = {copied.get_submodule(m.name): index for index, unit in enumerate(division.units) for m in unit.members}
    watch = _Watch(copied, len(division.units))
    context = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with mode, watch.flops, context, watch.calls(unit_of), saved_tensors_hooks(watch.save, lambda tensor: tensor):
        args, kwargs = arguments
        try:
            copied(*args, **kwargs)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CannotFollow(f"`{type(module).__name__}.forward` cannot be followed: {reason}") from error
        watch.count_flops()
    return watch.seen


class _Watch:
    """Attributes FLOPs and saved tensors to the unit whose call is under way."""

    def __init__(self, module: nn.Module, units: int) -> None:
        self.seen = DryRun([Seen() for _ in range(units)])
        self.flops = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
        self._now = self.seen.outside
        self._counted = 0
        self._depth = 0
        self._memory: dict[int, Tensor] = {storage_key(p): p for p in [*module.parameters(), *module.buffers()]}

    def count_flops(self) -> None:
        """Attribute the FLOPs since the last call to the current unit."""
        total = self.flops.get_total_flops()
        self._now.flops += total - self._counted
        self._counted = total

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        nbytes = self._note(tensor)
        self._now.saved += nbytes
        return tensor

    def _note(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's storage, or 0 if it was counted before."""
        key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        if key in self._memory:
            return 0
        self._memory[key] = tensor  # held, so that no other storage gets the same identity
        self._now.large += nbytes if nbytes >= MIN_OFFLOAD_BYTES else 0
        return nbytes

    @contextmanager
    def calls(self, unit_of: Mapping[nn.Module, int]) -> Iterator[None]:
        """Follow the calls of units within this scope."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._depth += 1
            if self._depth == 1:
                self.count_flops()
                self._now = self.seen.units[unit_of[module]]
                self.seen.calls.append(unit_of[module])
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                before = self._now.large
                self._now.inputs += sum(map(self._note, tensors))
                self._now.large_inputs += self._now.large - before

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                self.count_flops()
                self._now = self.seen.outside

        handles = [module.register_forward_pre_hook(begin, with_kwargs=True) for module in unit_of]
        handles += [module.register_forward_hook(end) for module in unit_of]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _copy_with(module: nn.Module, changed: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module with other tensors in place of its own; shared ones stay shared."""
    attributes = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    replaced: dict[int, Any] = {id(tensor): changed(tensor) for tensor in [*attributes, *module.buffers()]}
    for parameter in module.parameters():
        replaced[id(parameter)] = nn.Parameter(changed(parameter), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, replaced)


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Unpack inputs into arguments, as Lightning does with an `example_input_array`."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


# torch 2.6 does not count the FLOPs of attention on the CPU.
_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
