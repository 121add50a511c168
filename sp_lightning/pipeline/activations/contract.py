"""What a forward that runs again in backward is promised: the contract of `torch.utils.checkpoint`, and no more.

Its inputs are the same, and torch's random generators and autocast are as they were in the first forward. Buffers are,
too, and move once, so that BatchNorm counts a batch once. What else a forward may change is not simulated: where an
attribute, or what lies in it, differs after one of the first calls of a member, or where it is given an object such as
a key/value cache, the forward does not run again.
"""

from __future__ import annotations

import enum
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from types import ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from sp_lightning.pipeline.activations.saved import Packed, SavedTensors

_SMALL = 1 << 16  # bytes; running statistics are smaller, masks and position tables larger
_MOST = 1024  # parts of an attribute that are looked at
_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.dtype, torch.device)
_OF_RNNS = ("_flat_weights", "_flat_weight_refs")
_OF_TORCH = frozenset({*vars(nn.Module()), *_OF_RNNS})
# packages of objects that do not change; what lies in a namespace is a user's
_NOT_USER_DEFINED = {"torch", "sp_lightning", *sys.stdlib_module_names} - {"argparse", "types"}
_KERNELS: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
}


class Inputs:
    """The arguments of a unit's call, with tensors packed as autograd would have saved them.

    Tensors are detached from their graph. So they form no cycle with the node that an in-place change gives them, and
    hooks that the forward registers on them do not fire a second time.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        # an argument that is given twice stays one object: `nn.MultiheadAttention` branches on `key is value`
        data = {id(leaf): leaf for leaf in leaves if _is_data(leaf)}
        self._leaves = [(id(leaf), None if id(leaf) in data else leaf) for leaf in leaves]
        self._requires_grad = {key: tensor.requires_grad for key, tensor in data.items()}
        self.tensors = [tensor.detach() for tensor in data.values()]  # weights stand for themselves
        self.packed: list[Packed] = []  # what holds these, once they are packed
        # what is given that may change, as a cache does
        self.changeable = next((type(leaf).__name__ for leaf in leaves if _is_users(leaf)), None)
        # that a user has set, and that a second tensor would not have
        plain = [tensor for tensor in data.values() if type(tensor) is Tensor]
        self.have_attributes = any(map(vars, plain))

    @property
    def are_changed(self) -> bool:
        """Whether a tensor among the arguments was changed in place since the call."""
        return any(packed.is_changed for packed in self.packed)

    def pack(self, saved: SavedTensors) -> None:
        """Pack the tensors, from which they are unpacked to be rebuilt."""
        self.packed = [saved.handle(tensor) or saved.hold(tensor) for tensor in self.tensors]

    def rebuild(self, saved: SavedTensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for another call."""
        tensors = dict(zip(self._requires_grad, map(saved.unpack, self.packed), strict=True))
        for key, requires_grad in self._requires_grad.items():
            tensors[key] = tensors[key].detach().requires_grad_(requires_grad)
        leaves = [tensors.get(key, leaf) for key, leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs


def _is_data(value: Any) -> bool:
    """Tell whether an argument is a tensor that autograd could save, and not a weight."""
    if isinstance(value, nn.Parameter):
        return False
    return isinstance(value, Tensor) and not value.is_inference()


class Surroundings:
    """What a forward finds besides inputs and weights: random generators, settings around it, and buffers.

    Small buffers are copied, as BatchNorm changes its statistics without a version. Of others the version is known.
    """

    def __init__(self, device: torch.device, modules: Sequence[nn.Module]) -> None:
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
        self._default_device = torch.get_default_device()  # of this thread; autograd's has another
        self._kernels = [kernel for kernel, is_enabled in _KERNELS.items() if is_enabled()]
        # not the modules' own dictionaries: what lies there may lead to the graph that leads here
        self._buffers: list[tuple[ref[nn.Module], str, Tensor, int | None]] = []
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer.layout is torch.strided and buffer.nbytes <= _SMALL:
                    self._buffers.append((ref(module), name, _copy(buffer), None))
                else:
                    self._buffers.append((ref(module), name, buffer, _version(buffer)))

    @property
    def are_changed(self) -> bool:
        """Whether a large buffer was changed in place since."""
        return any(version not in (None, _version(held)) for _, _, held, version in self._buffers)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all of it for the duration of the block, and then what is there now."""
        devices = [] if self._api is None else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type), ExitStack() as scopes:
            torch.set_rng_state(self._random)
            if self._api is not None:
                self._api.set_rng_state(self._random_on_device, self._device)
            scopes.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._default_dtype)
            if torch.get_default_device() != self._default_device:
                scopes.enter_context(self._default_device)
            scopes.enter_context(sdpa_kernel(self._kernels))
            for kind, dtype, enabled, cache in self._autocast:
                scopes.enter_context(torch.autocast(kind, dtype, enabled, cache))
            for reference, name, held, version in self._buffers:
                module = reference()
                if module is not None:  # else it was replaced since
                    scopes.callback(module._buffers.__setitem__, name, module._buffers.get(name))
                    module._buffers[name] = _copy(held) if version is None else held
            yield


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)


class Look:
    """A look at the attributes of modules, and at the parts that they have, before a forward."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._seen: list[Any] = []  # held, so that no other object gets the identity of one
        self._before = self._read()

    def obstacle(self) -> str | None:
        """Return what keeps the forward, which is over, from running again, in words; None if nothing was seen."""
        before, after = self._before, self._read()
        for key in {**before, **after}:
            if before.get(key) != after.get(key):
                return key[1]
        return None

    def _read(self) -> dict[tuple[int, str], list[Any]]:
        """Return pictures by a number and what a difference means."""
        pictures = {(0, "draws random numbers that are not torch's"): _other_random_numbers()}
        for number, module in enumerate(self._modules):
            for name, value in vars(module).items():
                if name not in _OF_TORCH:
                    pictures[number, f"changes its attribute {name!r}"] = self._picture(value)
        return pictures

    def _picture(self, value: Any) -> list[Any]:
        """Return what can be compared of an object, its parts, and theirs."""
        parts = list(islice(_parts(value), _MOST))
        objects = [value, *parts, *islice(chain.from_iterable(map(_parts, parts)), _MOST)]
        self._seen += objects
        return [_mark(item) for item in objects]


def _mark(value: Any) -> tuple[Any, ...]:
    """Return what differs once a value does: a number or a text itself, an object's identity, a tensor's version."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple):
        return (tuple,)  # its parts say what it is
    return id(value), _version(value)


def _other_random_numbers() -> list[Any]:
    _, bits, position, *_ = sys.modules["numpy"].random.get_state()  # torch imports it
    return [random.getstate(), bits.tobytes(), position]


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    return vars(value).values() if _is_users(value) else ()


def _is_users(value: Any) -> bool:
    """Tell whether it is an object of a user's, or of a library's, unlike a logger or a process group."""
    if isinstance(value, type | enum.Enum | nn.Module | Tensor) or not hasattr(value, "__dict__"):
        return False
    return (type(value).__module__ or "").partition(".")[0] not in _NOT_USER_DEFINED


def _version(value: Any) -> int:
    if isinstance(value, torch.Generator):
        return hash(value.get_state().numpy().tobytes())
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
