"""Rehearses a step on the meta device, where nothing is computed, and counts the memory that it would take.

Only a forward shows what autograd saves of it, and only a backward what operations take meanwhile: with attention that
is not fused, both grow with the square of a row's length. So a language model of transformers is given a batch, and
each tensor counts for as long as it is alive.

Operations are taken for those of a GPU: attention is fused where the model asks torch for it, which saves its inputs,
its output and a number for each query; and autocast, which the meta device does not have, is done by hand.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.activations.offload import MIN_OFFLOAD_BYTES
from sp_lightning.pipeline.operands import name_of
from sp_lightning.pipeline.torch_private import storage_key
from sp_lightning.pipeline.weights.autocast import CASTING, weights_of_cast_layers

# what autocast computes in fp32 on a GPU, as far as language models use it
_IN_FLOAT = {F.layer_norm, F.softmax, F.log_softmax, F.cross_entropy, torch.softmax, torch.pow, Tensor.pow}


@dataclass
class _Call:
    """A call of a member, and the bytes that it takes beyond what is held before it."""

    name: str
    before: int  # bytes that are held as it begins
    inputs: list[Tensor]  # which are held until its backward is over
    held: int = 0
    saved: int = 0
    large: int = 0
    working: int = 0

    @property
    def footprint(self) -> Footprint:
        """What a planner would have measured."""
        return Footprint(self.held, self.saved, self.large, self.working, repeatable=True)


@dataclass
class StepMemory:
    """What a step takes on the device, beside weights, and gradients on their way."""

    calls: dict[str, Footprint] = field(default_factory=dict)  # of members, by their names
    turn_bytes: int = 0
    outside_bytes: int = 0


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations have made, as long as these are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self.peak = 0
        self._known: dict[int, object] = {}

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count the memory of a tensor that is there anyway."""
        self._known[storage_key(tensor)] = tensor

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # transformers asks whether each row of the batch is a single text
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._known:
            return
        memory = tensor.untyped_storage()
        nbytes = memory.nbytes()

        def forget(_: object) -> None:
            del self._known[key]
            self.nbytes -= nbytes

        self._known[key] = ref(memory, forget)
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)


class _AsOnGpu(TorchFunctionMode):
    """Runs attention fused, and casts as autocast does."""

    def __init__(self, lowered: torch.dtype | None) -> None:
        super().__init__()
        self._lowered = lowered

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_attention = func is F.scaled_dot_product_attention
        # which sees to its own casts, where autocast is on
        is_loss = name_of(func) == "chunked_cross_entropy"
        if self._lowered is not None and (func in CASTING or is_attention or is_loss):
            args, kwargs = _cast((args, kwargs), self._lowered)
        elif self._lowered is not None and func in _IN_FLOAT:
            args, kwargs = _cast((args, kwargs), torch.float32)
        if is_attention and kwargs.get("attn_mask") is None:
            fused = torch.ops.aten._scaled_dot_product_flash_attention
            options = {name: kwargs[name] for name in ("dropout_p", "is_causal", "scale") if name in kwargs}
            return fused(*args, **options)[0]
        return func(*args, **kwargs)


def _cast(operands: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, operands)


class _Rehearsal:
    """A step of which all calls keep what they save."""

    def __init__(self, alive: _Alive, weights: Collection[Tensor]) -> None:
        self.memory = StepMemory()
        self._alive = alive
        self._weights = weights
        self._held = set(map(storage_key, weights))
        self._held_bytes = 0
        self._calls: list[_Call] = []
        self._depth = 0  # of calls of members in each other
        self._backward: _Call | None = None
        self._left = 0  # bytes that were held as the last call was over

    def hold(self, tensor: Tensor) -> Tensor:
        """Count the memory of a tensor that autograd saves, or that a unit is given, once."""
        key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        if key not in self._held:
            self._held.add(key)
            self._held_bytes += nbytes
            if self._depth and nbytes >= MIN_OFFLOAD_BYTES:
                self._calls[-1].large += nbytes
        return tensor

    def begin(self, name: str, inputs: Any) -> None:
        """Begin the call of a member, if it is not part of another one's."""
        self._depth += 1
        if self._depth > 1:
            return
        self.memory.outside_bytes += self._held_bytes - self._left
        tensors = [tensor for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor)]
        call = _Call(name, self._held_bytes, tensors)
        self._calls.append(call)
        for tensor in tensors:
            self.hold(tensor)
        call.held = self._held_bytes - call.before
        self._alive.peak = self._alive.nbytes

    def end(self, output: Any) -> None:
        """End that call; backward reaches it as the gradient of what it returns is there."""
        self._depth -= 1
        if self._depth:
            return
        call = self._calls[-1]
        call.saved = self._held_bytes - call.before - call.held
        self._left = self._held_bytes
        returned = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor) and tensor.requires_grad]
        # if it runs again in backward, with gradients of what it returns
        gradients = sum(tensor.nbytes for tensor in returned)
        call.working = self._alive.peak - call.before + gradients
        for tensor in returned:
            tensor.register_hook(lambda _: self._reach(call))  # type: ignore[no-untyped-call]
        self._alive.peak = self._alive.nbytes

    def _reach(self, call: _Call) -> None:
        if call is not self._backward:
            self.end_backward()
            self._backward = call

    def end_backward(self) -> None:
        """End the backward of a call, or the turn to backward; gradients of resident weights leave, too."""
        if self._backward is None:
            self.memory.turn_bytes = self._alive.peak - self._left
        else:
            peak = self._alive.peak - self._backward.before
            self._backward.working = max(self._backward.working, peak)
            self._backward.inputs.clear()
        for weight in self._weights:
            weight.grad = None
        self._alive.peak = self._alive.nbytes

    def footprints(self) -> dict[str, Footprint]:
        """Return what calls of each member have taken."""
        footprints: dict[str, Footprint] = {}
        for call in self._calls:
            before = footprints.get(call.name)
            footprint = call.footprint
            footprints[call.name] = footprint if before is None else before.combined_with(footprint)
        return footprints


def on_meta(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module to the meta device, where it takes no memory; shared tensors stay shared."""
    attributes = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    copies: dict[int, Any] = {}
    for tensor in [*attributes, *module.buffers(), *module.parameters()]:
        empty = torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, copies)


def rehearse(
    module: nn.Module, members: Collection[str], tokens: int, length: int | None, lowered: torch.dtype | None
) -> StepMemory | None:
    """Return what a step of a model takes, or None if nobody knows what to call it with, or how.

    Args:
        module: A module on the meta device, which is changed.
        members: Names of the modules in it whose calls enter units that stream.
        tokens: Number of tokens in a step.
        length: Number of tokens in each row. None puts them all in one.
        lowered: The dtype of autocast; None if it is off.
    """
    if lowered is not None:
        cast = weights_of_cast_layers(module)
        for parameter in module.parameters():
            if id(parameter) in cast:
                parameter.data = parameter.data.to(lowered)
    length = min(length or tokens, tokens)
    text = torch.empty(-(-tokens // length), length, dtype=torch.int64, device="meta")
    try:
        model = _language_model_in(module)
        return None if model is None else _rehearsed(module, members, model, text, lowered)
    except Exception:  # it may look at values (to route tokens to experts), or do anything else
        return None


def _language_model_in(module: nn.Module) -> nn.Module | None:
    """Return the first module in it that can be given text: its forward takes `input_ids` and `labels`."""
    for candidate in module.modules():
        if {"input_ids", "labels"} <= inspect.signature(candidate.forward).parameters.keys():
            return candidate
    return None


def _rehearsed(
    module: nn.Module, members: Collection[str], model: nn.Module, text: Tensor, lowered: torch.dtype | None
) -> StepMemory:
    alive = _Alive()
    there = [*module.parameters(), *module.buffers()]
    for tensor in [*there, text]:
        alive.leave_out(tensor)
    rehearsal = _Rehearsal(alive, there)
    for name in members:
        _watch(rehearsal, name, module.get_submodule(name))
    hooks = saved_tensors_hooks(rehearsal.hold, lambda tensor: tensor)
    with alive, _AsOnGpu(lowered), hooks:
        output = model.train()(input_ids=text, labels=text)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        del output
        loss.backward()  # type: ignore[no-untyped-call]
    rehearsal.end_backward()
    rehearsal.memory.calls = rehearsal.footprints()
    return rehearsal.memory


def _watch(rehearsal: _Rehearsal, name: str, module: nn.Module) -> None:
    """Have calls of a member noted."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        rehearsal.begin(name, (args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        rehearsal.end(output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    for weight in trained:
        leave = partial(_let_go, trained)
        weight.register_post_accumulate_grad_hook(leave)  # type: ignore[no-untyped-call]


def _let_go(trained: Sequence[Tensor], _: Tensor) -> None:
    """Have the gradients of a member leave once all of them are there."""
    if all(weight.grad is not None for weight in trained):
        for weight in trained:
            weight.grad = None
