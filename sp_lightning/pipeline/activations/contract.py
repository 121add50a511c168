"""What a forward that runs again in backward is promised: the contract of `torch.utils.checkpoint`, and no more.

Its inputs are the same, and torch's random generators and autocast are as they were in the first forward. Buffers are,
too, and move once, so that BatchNorm counts a batch once. What else a forward may change is not simulated.

[Note: what may change]
A forward runs again only if nothing is known to be in the way, and what is not known to be safe is in the way. What is
given to a unit (a key/value cache, an iterator, a generator of random numbers) may change until backward, whoever does
it: it has to be of a kind that cannot. What is kept on a unit's modules is compared by value, at any depth, around one
of the first calls: by its pickle, in which tensors stand for themselves with their version. What has no pickle counts
as changed, but for what has no value that a forward could change: locks, weak references, torch's own objects. What
nobody can see in advance (a closure, a class's attribute, a module's global variable) shows in what the second forward
returns.
"""

from __future__ import annotations

import enum
import io
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyType, ref

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from sp_lightning.pipeline.activations.saved import Kept, SavedTensors
from sp_lightning.pipeline.tensors_in import tensors_in
from sp_lightning.pipeline.torch_private import storage_key

_SMALL = 1 << 16  # bytes; running statistics are smaller, masks and position tables larger
_COMPARED = 1 << 16  # numbers of an output that are compared: all of a small one
_PLAIN = (str, bytes, int, float, complex, type(None), frozenset, range, slice, torch.dtype, torch.device)
# what stands for itself: others look at it (tensors, modules), nobody sees how it changes (functions), or it does not
_BY_IDENTITY = (
    type, enum.Enum, ModuleType, FunctionType, nn.Module, Tensor, ref, ProxyType, type(Lock()), type(RLock()),
)  # fmt: skip
_OF_RNNS = ("_flat_weights", "_flat_weight_refs")
_OF_TORCH = frozenset({*vars(nn.Module()), *_OF_RNNS})
_KERNELS: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
}


class Inputs:
    """The arguments of a unit's call, with tensors held as autograd would have saved them.

    Tensors are detached from their graph. So they form no cycle with the node that an in-place change gives them, and
    hooks that the forward registers on them do not fire a second time.
    """

    def __init__(self, saved: SavedTensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        # an argument that is given twice stays one object: `nn.MultiheadAttention` branches on `key is value`
        data = {id(leaf): leaf for leaf in leaves if _is_data(leaf)}
        self._leaves = [(id(leaf), None if id(leaf) in data else leaf) for leaf in leaves]
        self._requires_grad = [(key, tensor.requires_grad) for key, tensor in data.items()]
        plain = [tensor.detach() for tensor in data.values()]  # weights stand for themselves
        self.storages = set(map(storage_key, plain))
        self.held = [saved.handle(tensor) or Kept(tensor, saved.meter) for tensor in plain]
        # what is given that may change, as a cache does
        self.changeable = next((type(leaf).__name__ for leaf in leaves if _may_change(leaf)), None)

    @property
    def are_changed(self) -> bool:
        """Whether a tensor among the arguments was changed in place since the call."""
        return any(held.is_changed for held in self.held)

    def rebuild(self, saved: SavedTensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for another call."""
        tensors = {
            key: saved.unpack(held).detach().requires_grad_(requires_grad)
            for (key, requires_grad), held in zip(self._requires_grad, self.held, strict=True)
        }
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
        # of this thread, as autograd's has another; torch 2.9 does not tell it after `set_default_device(None)`
        self._default_device = torch.empty(0).device
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
            if torch.empty(0).device != self._default_device:
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
    """A look at the attributes of modules, before a forward ([Note: what may change])."""

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

    def _read(self) -> dict[tuple[int, str], object]:
        """Return pictures by a number and what a difference means."""
        others = random.getstate(), sys.modules["numpy"].random.get_state()  # torch imports it
        pictures = {(0, "draws random numbers that are not torch's"): self._picture(others)}
        for number, module in enumerate(self._modules):
            for name, value in list(vars(module).items()):
                if name not in _OF_TORCH:
                    does = f"changes its attribute {name!r} (or that cannot be pickled, to be compared)"
                    pictures[number, does] = self._picture(value)
        return pictures

    def _picture(self, value: Any) -> object:
        file = io.BytesIO()
        reader = _Reader(file)
        reader.seen = self._seen
        try:
            reader.dump(value)
        except Exception:  # whatever a class's own code raises
            return object()  # which is equal to no other
        return file.getvalue()


class _Reader(pickle.Pickler):
    """Pickles what is to be compared, to bytes that nobody reads back."""

    seen: list[Any]

    def persistent_id(self, value: Any) -> Any:
        """Return what is compared instead of a value; None if that is its pickle."""
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if not _stands_for_itself(value):
            return None
        self.seen.append(value)
        return id(value), _version(value)


def _stands_for_itself(value: Any) -> bool:
    """Tell whether a value is compared as the object that it is, as all of torch's but its random generators are."""
    if isinstance(value, (*_PLAIN, torch.Generator)):
        return False
    package = (type(value).__module__ or "").partition(".")[0]
    return isinstance(value, _BY_IDENTITY) or package == "torch"


def _may_change(value: Any) -> bool:
    """Tell whether what is given to a unit is not known to be the same in backward."""
    if isinstance(value, MethodType | BuiltinFunctionType):
        return _may_change(value.__self__)
    if type(value) is Tensor:  # in whose place another one is given, without attributes that a user has set
        return bool(vars(value))
    return not (isinstance(value, _PLAIN) or _stands_for_itself(value))


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def numbers_of(output: Any) -> list[Tensor]:
    """Return numbers of each tensor in an output, which may itself be changed in place later on."""
    plain = [tensor for tensor in tensors_in(output) if type(tensor) is Tensor and not tensor.is_nested]
    flat = [tensor.detach().reshape(-1) for tensor in plain if tensor.layout is torch.strided]
    return [numbers[:: len(numbers) // _COMPARED + 1].clone() for numbers in flat]


def differ(first: Tensor, second: Tensor) -> bool:
    """Tell whether a second forward, in whose surroundings this is, has returned other numbers than the first.

    On the CPU these are the same bits. On an accelerator some kernels add in another order each time, and some are
    chosen by how fast they are. What comes of that stays below the tolerance; what a forward has changed rarely does.
    """
    if first.device.type == "cpu":
        return not torch.allclose(first, second, 0, 0, equal_nan=True)
    is_lowered = torch.is_autocast_enabled(first.device.type) or first.element_size() < 4
    gap = (first.float() - second.float()).nan_to_num(0)
    size = first.float().nan_to_num(0, 0, 0).norm()
    return bool(gap.norm() > size * (0.03 if is_lowered else 0.001))
