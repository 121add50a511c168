"""A forward in which nothing is computed: what each unit would compute, and what autograd would save.

Tensors have shapes and dtypes and no values, so a model of any size is followed in seconds, without its weights and
without the device. `estimate.py` makes a workload of what is seen.
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
from sp_lightning.pipeline.activations.offload import SMALLEST
from sp_lightning.pipeline.weights.units import Division


@dataclass
class Seen:
    """What was seen of the calls of one unit, or of all that is outside of units.

    Attributes:
        flops: Multiplications and additions.
        inputs: Bytes of its inputs that autograd saved, or that a second forward would need.
        saved: Bytes that autograd saved beyond that.
        large: Bytes of all that, in pieces that are worth a copy to the host.
    """

    flops: int = 0
    inputs: int = 0
    saved: int = 0
    large: int = 0


@dataclass
class DryRun:
    """What was seen of one forward.

    Attributes:
        units: For each unit, in the order of the division.
        outside: All that is outside of units.
        calls: Which unit was called, call by call.
    """

    units: list[Seen]
    outside: Seen = field(default_factory=Seen)
    calls: list[int] = field(default_factory=list)


class CannotFollow(ValueError):
    """A forward needs values, or does not take these inputs."""


def shapes_of(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a module on the meta device, whatever the size of the module.

    Args:
        module: The module, on any device; it stays as it is.
        dtype: What floating-point parameters and buffers are converted to; `None` leaves them.
    """

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)

    return _copy_with(module, on_meta)


def dry_run(module: nn.Module, division: Division, inputs: Any, autocast: torch.dtype | None) -> DryRun:
    """Follow one forward of a module that builds a graph.

    Args:
        module: On the meta device. It is not called: a copy is.
        division: Its units. Weights whose `compute_dtype` is not their own are taken in that one.
        inputs: What to call it with: a tuple is unpacked, and so is a dictionary with names of arguments. Of tensors
            only shapes and dtypes matter, so they may be on the meta device.
        autocast: The dtype of autocast, if it is on.

    Raises:
        CannotFollow: The forward raises, because it needs values or does not take these inputs.
    """
    dtypes = {id(weight.master): weight.compute_dtype for unit in division.units for weight in unit.weights}
    mode = without_values()

    def imagined(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=dtypes.get(id(tensor), tensor.dtype))

    twin = _copy_with(module, imagined).train()
    arguments = tree_map(lambda leaf: imagined(leaf) if isinstance(leaf, Tensor) else leaf, _as_arguments(inputs))
    unit_of = {twin.get_submodule(m.name): index for index, unit in enumerate(division.units) for m in unit.members}
    watch = _Watch(twin, len(division.units))
    context = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with mode, watch.flops, context, watch.calls(unit_of), saved_tensors_hooks(watch.save, lambda tensor: tensor):
        args, kwargs = arguments
        try:
            twin(*args, **kwargs)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CannotFollow(f"`{type(module).__name__}.forward` cannot be followed: {reason}") from error
        watch.count_flops()
    return watch.seen


class _Watch:
    """Notes FLOPs and saved tensors, for the unit whose call is under way."""

    def __init__(self, module: nn.Module, units: int) -> None:
        self.seen = DryRun([Seen() for _ in range(units)])
        self.flops = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
        self._now = self.seen.outside
        self._counted = 0
        self._depth = 0
        self._memory: dict[int, Tensor] = {storage_key(p): p for p in [*module.parameters(), *module.buffers()]}

    def count_flops(self) -> None:
        """What was computed since the last time belongs to where we have been."""
        total = self.flops.get_total_flops()
        self._now.flops += total - self._counted
        self._counted = total

    def save(self, tensor: Tensor) -> Tensor:
        """Autograd saves a tensor."""
        nbytes = self._note(tensor)
        self._now.saved += nbytes
        return tensor

    def _note(self, tensor: Tensor) -> int:
        """The bytes of a tensor's memory, if it was not noted before."""
        key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        if key in self._memory:
            return 0
        self._memory[key] = tensor  # held, so that no other memory gets the same identity
        self._now.large += nbytes if nbytes >= SMALLEST else 0
        return nbytes

    @contextmanager
    def calls(self, unit_of: Mapping[nn.Module, int]) -> Iterator[None]:
        """Notice when calls of units begin and end."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._depth += 1
            if self._depth == 1:
                self.count_flops()
                self._now = self.seen.units[unit_of[module]]
                self.seen.calls.append(unit_of[module])
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self._now.inputs += sum(map(self._note, tensors))

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
    """A copy of a module with other tensors; those that are shared stay shared."""
    attributes = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    replaced: dict[int, Any] = {id(tensor): changed(tensor) for tensor in [*attributes, *module.buffers()]}
    for parameter in module.parameters():
        replaced[id(parameter)] = nn.Parameter(changed(parameter), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, replaced)


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As Lightning calls a module with its `example_input_array`."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


# torch 2.6 does not count what attention takes on the CPU.
_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
