"""How much memory a step takes on the emulated device, where "device" and host are the same kind of memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_lightning.pipeline import host
from sp_lightning.pipeline.transfer import Backend


class Elsewhere:
    """Memory that is no tensor of a computation: the engine's host memory, and slots for weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ranges: list[tuple[int, int]] = []
        map_pages = host._map_pages

        def watched(nbytes: int) -> mmap.mmap:
            pages = map_pages(nbytes)
            self._add(ctypes.addressof(ctypes.c_char.from_buffer(pages)), nbytes)
            return pages

        monkeypatch.setattr(host, "_map_pages", watched)

    def add(self, memory: Tensor) -> None:
        """Do not count this."""
        self._add(memory.data_ptr(), memory.nbytes)

    def _add(self, address: int, nbytes: int) -> None:
        self._ranges.append((address, address + nbytes))

    def has(self, memory: Tensor) -> bool:
        return any(start <= memory.data_ptr() < end for start, end in self._ranges)


class DeviceMemory(TorchDispatchMode):
    """Sums up the memory of all living tensors that operations under it have made, after every single operation."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        super().__init__()
        self.peak = 0
        self._elsewhere = elsewhere
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        """Bytes of it."""
        self._living = {key: entry for key, entry in self._living.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._living.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and not self._elsewhere.has(tensor):
                storage = tensor.untyped_storage()
                self._living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)
        return output


def watch_allocations(backend: Backend, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What the backend allocates until the result is called is for weights and gradients."""
    allocate = backend.allocate

    def watched(nbytes: int) -> Tensor:
        memory = allocate(nbytes)
        elsewhere.add(memory)
        return memory

    monkeypatch.setattr(backend, "allocate", watched)
    return lambda: monkeypatch.setattr(backend, "allocate", allocate)
