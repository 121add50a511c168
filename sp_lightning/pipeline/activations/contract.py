"""What a forward that runs again in backward is promised: the contract of `torch.utils.checkpoint`, and no more.

Random generators of torch and autocast are as they were in the first forward. Buffers are, too, and move once, so that
BatchNorm counts a batch once. All else that a forward may change (attributes, lists, a key/value cache that it is
given) is looked at, not simulated: where something of it differs after a call, the forward does not run again. A look
goes a few levels deep, at no more than so many objects, and only in some calls (see `History` in recompute.py).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from types import ModuleType, SimpleNamespace
from typing import Any

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


class Surroundings:
    """A snapshot of torch's random generators and settings.

    Args:
        device: The device that the forward runs on.
    """

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
        random, settings = _random_states(self._device), [read() for read, _ in _SETTINGS]
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
            _set_random_states(self._device, random)


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
    """A look at the attributes of modules, and at objects among a call's arguments, before a forward.

    Args:
        modules: The modules.
        objects: The objects. One that holds tensors is taken for a cache: whoever gave it may change it later, and a
            call that held it would hold a graph.
    """

    def __init__(self, modules: Sequence[nn.Module], objects: Sequence[Any]) -> None:
        self._modules = modules
        self._objects = objects
        self._before = self._read()

    def _read(self) -> dict[Any, list[tuple[Any, int]]]:
        seen: dict[Any, list[tuple[Any, int]]] = {
            (number, name): _picture(value)
            for number, module in enumerate(self._modules)
            for name, value in vars(module).items()
            if name not in _OF_TORCH
        }
        return seen | {number: _picture(value) for number, value in enumerate(self._objects)}

    def obstacle(self) -> str | None:
        """Return what keeps the forward, which is over, from running again, in words; None if nothing is to be seen."""
        after = self._read()
        for key in {**self._before, **after}:
            before, now = self._before.get(key), after.get(key)
            is_given = not isinstance(key, tuple)
            is_cache = is_given and now is not None and any(isinstance(value, Tensor) for value, _ in now)
            if is_cache or not _are_same(before, now):
                if not is_given:
                    return f"changes its attribute {key[1]!r}"
                kind = type(self._objects[key]).__name__
                return (
                    f"is given an object that holds what may change ({kind}; if it is a cache, set `use_cache=False`)"
                )
        return None


def _picture(value: Any) -> list[tuple[Any, int]]:
    """Return an object and what it holds, a few levels deep, with the versions of tensors."""
    seen: list[tuple[Any, int]] = []
    level: list[Any] = [value]
    for _ in range(_LEVELS):
        seen += [(each, _version(each) if isinstance(each, Tensor) else 0) for each in level]
        level = list(islice(chain.from_iterable(map(_parts, level)), _MOST))
    return seen


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    is_open = isinstance(value, SimpleNamespace | Namespace) or _is_user_defined(type(value))
    if not is_open or isinstance(value, type | nn.Module | Tensor):
        return ()
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _is_user_defined(kind: type) -> bool:
    """Tell whether objects of a class may hold what a forward changes, unlike a logger or a process group."""
    return (kind.__module__ or "").partition(".")[0] not in _NOT_USER_DEFINED


def _are_same(before: list[tuple[Any, int]] | None, now: list[tuple[Any, int]] | None) -> bool:
    if before is None or now is None or len(before) != len(now):
        return False
    for (old, old_version), (new, new_version) in zip(before, now, strict=True):
        if old is new:
            if old_version != new_version:
                return False
        elif type(old) is not type(new) or not (isinstance(old, tuple) or (isinstance(old, PLAIN) and old == new)):
            return False
    return True


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
