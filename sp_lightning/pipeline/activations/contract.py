"""What a forward that runs again in backward is promised: the contract of `torch.utils.checkpoint`, and no more.

Random generators of torch and autocast are as they were in the first forward. Buffers are, too, and move once, so that
BatchNorm counts a batch once. All else that a forward may change (attributes, lists, a key/value cache that it is
given) is looked at, not simulated: where something of it differs after a call, the forward does not run again. A look
goes a few levels deep, at no more than so many objects, and only in some calls (see `History` in recompute.py).
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.backends import cuda

_SMALL = 1 << 16  # bytes; running statistics are smaller, masks and position tables larger
_LEVELS = 6  # two caches in one, a cache, its list of layers, a layer, the tensors in it
_MOST = 256  # objects on one of these levels
PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.dtype, torch.device)
_OF_TORCH = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})  # the latter two are an RNN's
_NOT_USER_DEFINED = {"torch", __name__.partition(".")[0], *sys.stdlib_module_names}

# what decides which kernel attends, and what a new tensor is: set around a model's forward (`sdpa_kernel`, Lightning's
# double precision), and no longer in its backward
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)

_Picture: TypeAlias = list[tuple[Any, int]]


class Surroundings:
    """A snapshot of torch's random generators and settings."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = _random_states(device)
        self._has_cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {device.type, "cpu"}
        ]
        self._settings = [read() for read, _ in _SETTINGS]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the snapshot for the duration of the block, and then what is there now."""
        now, settings = _random_states(self._device), [read() for read, _ in _SETTINGS]
        scopes = [torch.autocast(kind, dtype, enabled, self._has_cache) for kind, dtype, enabled in self._autocast]
        try:
            _set_random_states(self._device, self._random)
            _change_settings(settings, self._settings)
            for scope in scopes:
                scope.__enter__()  # type: ignore[no-untyped-call]
            yield
        finally:
            for scope in reversed(scopes):
                scope.__exit__(None, None, None)
            _change_settings(self._settings, settings)
            _set_random_states(self._device, now)


def _random_states(device: torch.device) -> list[Tensor]:
    on_device = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *on_device]


def _set_random_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def _change_settings(before: list[Any], after: list[Any]) -> None:
    for (_, write), old, new in zip(_SETTINGS, before, after, strict=True):
        if old != new:
            write(new)


class Buffers:
    """The buffers of modules as a forward found them.

    Small ones are copied, because BatchNorm changes its statistics without a version. Of others the version is known.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._held: list[tuple[dict[str, Tensor | None], str, Tensor, int | None]] = []
        self.obstacle: str | None = None
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if isinstance(module, torch.jit.ScriptModule):  # in C++, where nothing can take its place
                    self.obstacle = "has a scripted part with buffers"
                elif buffer.grad_fn is not None:
                    self.obstacle = f"has a graph in its buffer {name!r}"
                elif buffer.layout is torch.strided and buffer.nbytes <= _SMALL:
                    copy = buffer.detach().clone().requires_grad_(buffer.requires_grad)
                    self._held.append((module._buffers, name, copy, None))
                else:
                    self._held.append((module._buffers, name, buffer, _version(buffer)))

    @property
    def are_changed(self) -> bool:
        """Whether a large one was changed in place since."""
        return any(version is not None and _version(buffer) != version for *_, buffer, version in self._held)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have modules find them as they were for the duration of the block, and then those that are there now."""
        now = [(of, name, of.get(name)) for of, name, *_ in self._held]
        try:
            for of, name, buffer, version in self._held:
                of[name] = (
                    buffer if version is not None else buffer.clone().detach().requires_grad_(buffer.requires_grad)
                )
            yield
        finally:
            for of, name, present in now:
                of[name] = present


class Look:
    """A look at the attributes of modules, and at objects among a call's arguments, before a forward."""

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[Any]) -> None:
        self._modules = modules
        self._objects = objects
        self._random = _other_random_numbers()
        self._before = self._read()

    def _read(self) -> dict[Any, _Picture]:
        seen: dict[Any, _Picture] = {number: _picture(value) for number, value in enumerate(self._objects)}
        for number, module in enumerate(self._modules):
            own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
            seen |= {(number, name): _picture(value) for name, value in own.items()}
        return seen

    def obstacle(self) -> str | None:
        """Return what keeps the forward, which is over, from running again, in words; None if nothing is to be seen."""
        if self._modules and self._random != _other_random_numbers():
            return "draws random numbers that are not torch's"
        after = self._read()
        for key in {**self._before, **after}:
            is_same = key in self._before and key in after and _are_same(self._before[key], after[key])
            if isinstance(key, tuple) and not is_same:
                return f"changes its attribute {key[1]!r}"
            if not isinstance(key, tuple) and (
                not is_same or any(isinstance(value, Tensor) for value, _ in after[key])
            ):
                kind = type(self._objects[key]).__name__
                return f"is given a {kind!r}, which may change (if it is a cache, set `use_cache=False`)"
        return None


def _other_random_numbers() -> list[Any]:
    if "numpy" not in sys.modules:
        return [random.getstate()]
    _, bits, position, *_ = sys.modules["numpy"].random.get_state()
    return [random.getstate(), bits.tobytes(), position]


def _picture(value: Any) -> _Picture:
    """Return an object and what it holds, a few levels deep, with the versions of tensors."""
    seen: _Picture = []
    level: list[Any] = [value]
    for _ in range(_LEVELS):
        seen += [(each, _version(each)) for each in level]
        level = list(islice(chain.from_iterable(map(_parts, level)), _MOST))
    return seen


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    # attributes of users' own objects, unlike those of a logger or a process group
    is_users = (type(value).__module__ or "").partition(".")[0] not in _NOT_USER_DEFINED
    is_open = (is_users or isinstance(value, SimpleNamespace | Namespace)) and hasattr(value, "__dict__")
    return vars(value).values() if is_open and not isinstance(value, type | nn.Module | Tensor) else ()


def _are_same(before: _Picture, now: _Picture) -> bool:
    for (old, old_version), (new, new_version) in zip(before, now, strict=False):
        is_equal = isinstance(old, tuple) or (isinstance(old, PLAIN) and old == new)
        if old_version != new_version or not (old is new or (type(old) is type(new) and is_equal)):
            return False
    return len(before) == len(now)


def _version(value: Any) -> int:
    if isinstance(value, torch.Generator):
        return hash(value.get_state().numpy().tobytes())
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
