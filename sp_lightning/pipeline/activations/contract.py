"""The promise to a forward that runs again in backward, and checks that find in time where it cannot be kept.

It is the contract of `torch.utils.checkpoint`, and no more: a forward's inputs are the same, and torch's random
generators and autocast are as they were in the first forward. So are its modules' buffers, also those that did not
exist yet, its modes (`train()`, `eval()`), and the flags `requires_grad`. All of it advances once, so that BatchNorm
counts a batch once. The engine simulates no other change by a forward.

[Note: what may change]
A forward runs again only if nothing is known to be in the way, and anything that is not known to be safe is in the way.
Any code may change the arguments of a unit until backward (a key/value cache, an iterator, a generator of random
numbers). So each has to be of a kind that cannot change, a tensor whose version tells, or a module. Around a unit's
first calls, a look compares the state of its modules, and its arguments if these are of a kind that can be compared.
Changes that cannot be seen in advance (in a closure, a class's attribute, a global variable) show in the output of the
second forward.

[Note: what a look compares]
A look compares numbers and texts, at any depth of tuples, lists, dicts, sets, partials, methods, and objects that are
nothing but their attributes. It compares tensors by identity and version, and small ones by their numbers, too, as
kernels write to running statistics without a version. Classes, functions, enums, weak references, loggers and torch's
operators stand for themselves. Everything else counts as changed, as does a value that leads to too many others. So a
look reads no memory map and no data set, and a kind that is not listed here is on the safe side.
"""

from __future__ import annotations

import enum
import gc
import logging
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.operations import (
    MOST_OBJECTS,
    NUMBERS_AND_TEXTS,
    STATE_OF_MODULES,
    Args,
    Kwargs,
    numpy,
    tensors_in,
)
from sp_lightning.pipeline.torch_private import contains_others, storage_key, without_torch_function
from sp_lightning.pipeline.weights.leaf import CopiedPlainly, TwinParameter

_SMALL_BUFFER = 1 << 19  # bytes; running statistics are smaller, masks and position tables larger
_COMPARED = 1 << 16  # bytes of a tensor, or of an array
_PLAIN = NUMBERS_AND_TEXTS | {range, slice, type(...), torch.layout, torch.memory_format}
# kinds whose objects may have a state that no forward reads, or that no code sees
_BY_IDENTITY = (
    type, enum.Enum, ModuleType, FunctionType, logging.Logger, torch._ops.OperatorBase, torch._ops.OpOverloadPacket,
    ref, fx.Graph, numpy.number, numpy.bool_,
)  # fmt: skip
_CALLABLES = (partial, MethodType, BuiltinFunctionType)


def may_change(value: Any) -> bool:
    """Tell whether an argument of a unit may change until backward, by any code."""
    kind = type(value)
    if kind in _CALLABLES:
        return any(map(may_change, gc.get_referents(value)))
    # the second forward gets another one, without attributes that a user has set
    if isinstance(value, Tensor):
        has_slots = kind.__basicsize__ > Tensor.__basicsize__
        return not isinstance(value, nn.Parameter) and (has_slots or bool(vars(value)))
    return not (kind in _PLAIN or isinstance(value, (nn.Module, *_BY_IDENTITY)))


class Snapshot:
    """A look at modules and at the arguments of their call, before a forward ([Note: what a look compares])."""

    def __init__(self, modules: Sequence[nn.Module], given: Sequence[Any]) -> None:
        self._modules = modules
        # arguments that may change are not looked at: a unit that gets one keeps its saved tensors anyway
        self._given = [value for value in given if not may_change(value)]
        # objects in pictures; holding them keeps their identities from being given again
        self._seen: list[Any] = []
        self._before = dict(self._read())

    def obstacle(self) -> str | None:
        """Return the reason, as a phrase, why the forward that is over cannot run again; None if none was seen."""
        after = dict(self._read())
        changed = [key for key in {**self._before, **after} if self._before.get(key) != after.get(key)]
        return changed[0][1] if changed else None

    def _read(self) -> Iterator[tuple[tuple[int, str], object]]:
        """Yield pictures, each with a number and the meaning of a difference."""
        generators = pickle.dumps((random.getstate(), numpy.random.get_state()))
        yield (0, "draws random numbers that are not torch's"), generators
        yield (0, "changes what it is given"), self._digest([*self._given])
        for number, module in enumerate(self._modules):
            if _parts_of(module) is None:
                yield (number, "has slots, or is a dict, which cannot be compared"), object()
            yield (number, "replaces a part of itself"), [*map(id, module._modules.values())]
            # a weight of ours is there as its master or as its twin
            others = {name: value for name, value in module._parameters.items() if not isinstance(value, CopiedPlainly)}
            for name, value in {**others, **vars(module)}.items():
                if name not in STATE_OF_MODULES:
                    difference = f"changes its attribute {name!r} (or that cannot be compared)"
                    yield (number, difference), self._digest([value])

    def _digest(self, waiting: list[Any]) -> object:
        """Return the contents of values, to be compared; if they are unknown, an object that is equal to no other."""
        picture: list[object] = []
        self._seen.append(waiting)
        known = set(map(id, self._modules))
        for value in waiting:  # it grows
            kind = type(value)
            if kind in _PLAIN:
                picture.append((kind, value))
            elif id(value) in known or isinstance(value, _BY_IDENTITY):
                picture.append(id(value))
            else:
                known.add(id(value))
                parts = _parts_of(value)
                if parts is None or len(waiting) + len(parts) > MOST_OBJECTS:
                    return object()
                waiting += parts
                picture.append((kind if _is_container(value) else id(value), len(parts)))
        return picture


def _is_container(value: Any) -> bool:
    return type(value) in (list, set, frozenset, dict, OrderedDict) or isinstance(value, tuple)


def _parts_of(value: Any) -> list[Any] | None:
    """Return all that an object holds; None if it may hold anything else."""
    kind = type(value)
    if isinstance(value, CopiedPlainly):
        return [version_of(value)]
    if kind in (dict, OrderedDict):
        return [*value, *value.values()]
    if _is_container(value) or kind in _CALLABLES:
        return gc.get_referents(value)
    if kind is numpy.ndarray and value.nbytes <= _COMPARED and not value.dtype.hasobject:
        return [str(value.dtype), value.shape, value.tobytes()]
    # with slots, or a base class in C, objects would take more memory
    plain = Tensor if isinstance(value, Tensor) else nn.Module
    if (kind.__basicsize__, kind.__dictoffset__) != (plain.__basicsize__, plain.__dictoffset__):
        return None
    return [vars(value), version_of(value), _numbers_of(value)] if plain is Tensor else [vars(value)]


def _numbers_of(tensor: Tensor) -> str:
    """Return a small tensor's numbers; nothing if it has none, as on the meta device."""
    if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.nbytes <= _COMPARED:
        with suppress(RuntimeError):
            return str(tensor.tolist())
    return ""


def is_small_buffer(tensor: Tensor) -> bool:
    """Tell whether a tensor is a buffer that is copied for the second forward: it is small, and lies in memory."""
    if isinstance(tensor, nn.Parameter) or is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and tensor.nbytes <= _SMALL_BUFFER


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version. For a master, this waits until the work on it is done, as it does for any reader."""
    with without_torch_function() if isinstance(tensor, TwinParameter) else nullcontext():
        return 0 if tensor.is_inference() else tensor._version


_NUMBERS_COMPARED = 1 << 16  # about how many numbers of an output are compared: all of a small one
_KERNELS: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
}


@contextmanager
def requiring_gradients(flags: Iterable[tuple[Tensor, bool]]) -> Iterator[None]:
    """Have tensors require a gradient, or not, for the duration of the block."""
    with without_torch_function():
        changed = [(tensor, flag) for tensor, flag in flags if tensor.requires_grad != flag]
        for tensor, flag in changed:
            tensor.requires_grad_(flag)
    try:
        yield
    finally:
        with without_torch_function():
            for tensor, flag in changed:
                tensor.requires_grad_(not flag)


class Inputs:
    """The arguments of a unit's call, with tensors held as autograd would have saved them.

    Tensors are detached from their graph. So they form no cycle with the node that an in-place change gives them, and
    hooks that the forward registers on them do not fire a second time.
    """

    def __init__(self, saved: SavedTensors, args: Args, kwargs: Kwargs) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        # an argument that is passed twice stays one object: `nn.MultiheadAttention` branches on `key is value`
        data = {
            id(leaf): leaf
            for leaf in leaves
            if isinstance(leaf, Tensor) and not (isinstance(leaf, nn.Parameter) or leaf.is_inference())
        }
        self._leaves = [(id(leaf), None if id(leaf) in data else leaf) for leaf in leaves]
        self.storages = set(map(storage_key, data.values()))
        self._packed = {
            identity: (saved.pack(tensor.detach()), tensor.requires_grad) for identity, tensor in data.items()
        }
        self.weights = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        # the class of an argument that may change, as a cache does; None if there is none
        self.changeable = next((type(leaf).__name__ for leaf in leaves if may_change(leaf)), None)

    @property
    def are_changed(self) -> bool:
        """Whether a tensor among the arguments was changed in place since the call."""
        return any(packed.is_changed for packed, _ in self._packed.values())

    def rebuild(self, saved: SavedTensors) -> tuple[Args, Kwargs]:
        """Return the arguments for another call."""
        tensors = {
            identity: saved.unpack(packed).detach().requires_grad_(requires_grad)
            for identity, (packed, requires_grad) in self._packed.items()
        }
        leaves = [tensors.get(identity, leaf) for identity, leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs


class Surroundings:
    """The surroundings of a forward besides inputs and weights: random generators, settings, modes, and buffers.

    Small buffers are copied, because BatchNorm changes its statistics without a version. Large buffers are compared by
    version, and so are weights among the arguments, and parameters that the engine does not manage.
    """

    def __init__(
        self,
        device: torch.device,
        modules: Sequence[nn.Module],
        weights: Iterable[nn.Parameter],
    ) -> None:
        self._device = device
        self._api = None if device.type == "cpu" else torch.get_device_module(device)
        self._random = torch.get_rng_state()
        self._random_on_device = None if self._api is None else self._api.get_rng_state(device)
        is_cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), is_cached)
            for kind in {device.type, "cpu"}
        ]
        self._default_dtype = torch.get_default_dtype()  # Lightning's double precision sets it
        # backward may be called under another default device; torch 2.9 does not tell it after
        # `set_default_device(None)`
        self._default_device = torch.empty(0).device
        self._kernels = [kernel for kernel, is_enabled in _KERNELS.items() if is_enabled()]
        # modules with copies of their dictionaries: values in these may lead to the graph that leads here
        self._modules: list[tuple[ref[nn.Module], bool, dict[str, Tensor | None]]] = []
        # masters are not watched: their versions tell nothing, as optimizers step them
        watched: list[Tensor] = [
            weight for weight in weights if isinstance(weight, TwinParameter) or not isinstance(weight, CopiedPlainly)
        ]
        for module in modules:
            buffers = {name: _copy_of_small(buffer) for name, buffer in module._buffers.items()}
            self._modules.append((ref(module), module.training, buffers))
            for name, buffer in buffers.items():
                is_large = buffer is module._buffers[name]
                if buffer is not None and is_large:
                    watched.append(buffer)
            parameters = module._parameters.values()
            watched += [parameter for parameter in parameters if not isinstance(parameter, CopiedPlainly | None)]
        with without_torch_function():
            self._watched = [(tensor, version_of(tensor), tensor.requires_grad) for tensor in watched]

    @property
    def are_changed(self) -> bool:
        """Whether a large buffer, or a parameter that is not managed, was changed in place since."""
        with without_torch_function():
            return any(version_of(tensor) != version for tensor, version, _ in self._watched)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all of it for the duration of the block, and afterwards the present state."""
        devices = [] if self._api is None else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type), ExitStack() as scopes:
            torch.set_rng_state(self._random)
            if self._api is not None:
                self._api.set_rng_state(self._random_on_device, self._device)
            scopes.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._default_dtype)
            if torch.empty(0).device != self._default_device:
                scopes.enter_context(self._default_device)
            scopes.enter_context(sdpa_kernel(self._kernels))
            for kind, dtype, enabled, cache in self._autocast:
                scopes.enter_context(torch.autocast(kind, dtype, enabled, cache))
            flags = [(tensor, flag) for tensor, _, flag in self._watched if tensor.is_leaf]
            scopes.enter_context(requiring_gradients(flags))
            found: list[tuple[Any, ...]] = []
            scopes.callback(_leave_as_found, found)
            for reference, training, buffers in self._modules:
                module = reference()
                if module is not None:  # else it was replaced since
                    found.append((module, {**vars(module)}, {**module._parameters}, {**module._buffers}))
                    vars(module)["training"] = training
                    module._buffers.clear()
                    module._buffers.update({name: _copy_of_small(buffer) for name, buffer in buffers.items()})
            yield


def _leave_as_found(found: Iterable[tuple[Any, ...]]) -> None:
    """Give modules back the attributes, parameters and buffers that a second forward found, which may end halfway."""
    for module, attributes, parameters, buffers in found:
        current = vars(module)
        current.clear()
        current.update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)
        # parameters that are there stay: they may be others by now, as they are sent in another dtype
        module._parameters.update({**parameters, **module._parameters})


def _copy_of_small(buffer: Tensor | None) -> Tensor | None:
    """Return a copy of a buffer; a large one as it is."""
    if buffer is None or not is_small_buffer(buffer):
        return buffer
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)


def numbers_of(output: Any) -> list[Tensor]:
    """Return numbers of each tensor in an output, which may itself be changed in place later on."""
    numbers = []
    for tensor in tensors_in(output):
        if tensor.layout is torch.strided and not tensor.is_nested and not contains_others(tensor):
            flat = tensor.detach().as_subclass(Tensor).reshape(-1)
            sample = flat[:: len(flat) // _NUMBERS_COMPARED + 1].resolve_conj().clone()
            numbers.append(torch.view_as_real(sample) if sample.is_complex() else sample)
    return numbers


def are_other(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Tell whether a second forward has returned other numbers than the first."""
    return len(first) != len(second) or any(map(differ, first, second))


def differ(first: Tensor, second: Tensor) -> bool:
    """Tell whether a second forward, in whose surroundings this is, has returned other numbers than the first.

    On the CPU these are the same bits. On an accelerator some kernels add in another order each time, and some are
    chosen by how fast they are. Such differences stay below the tolerance; those of a changed forward rarely do.
    """
    if first.shape != second.shape or first.dtype is not second.dtype:
        return True
    if first.device.type == "cpu":
        return not torch.allclose(first, second, 0, 0, equal_nan=True)
    is_lowered = torch.is_autocast_enabled(first.device.type) or first.element_size() < 4
    gap = (first.float() - second.float()).nan_to_num(0)
    size = first.float().nan_to_num(0, 0, 0).norm()
    return bool(gap.norm() > size * (0.03 if is_lowered else 0.001))
