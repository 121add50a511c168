"""The paper's plain scheme: a window of k blocks moves through the model, k' of them at a time (arXiv 2410.08791).

This baseline is reimplemented from the paper's idea, not from its authors' code. When a block that is not on the device
has to compute, the next k' blocks are copied to the device, after enough others have left to make room in the window.
Everything happens in program order: ordinary copies between the device and pageable memory, on the compute stream, and
the host waits for each of them. Weights and gradients are copied back when a block leaves. What is in no block stays on
the device, and so do buffers and weights that several blocks share.

What the idea leaves open for training is done in the simplest exact way. Weights that autograd saves are looked up
again in backward, because a saved one would stay on the device as long as the graph. When backward is over, all blocks
return to the host, where the optimizer steps them. If k covers the whole model, nothing leaves, and everything is as in
plain Lightning. Casts of weights that `bf16-mixed` saves for backward do stay on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from suite.systems.base import System
from suite.workloads import Window, Workload


class Paper(System):
    """A window of k blocks with synchronous swaps.

    The paper leaves k and k' to the user. The default is the smallest window in which one block can arrive while
    another stays.
    """

    name = "paper"
    title = "the paper's scheme"
    takes_windows: ClassVar[bool] = True

    def __init__(self, window: Window | None = None, budget: int | None = None) -> None:
        super().__init__(window or (2, 1), budget)
        self._device = torch.device("cpu")
        self._strategy: PaperStrategy | None = None

    @override
    def prepare(self, module: L.LightningModule, workload: Workload, device: torch.device) -> L.LightningModule:
        self._device = device
        return module

    @override
    def trainer_arguments(self, workload: Workload) -> dict[str, Any]:
        assert self.window is not None
        self._strategy = PaperStrategy(self._device, *self.window)
        return {"strategy": self._strategy, "precision": workload.precision}

    @override
    def facts(self) -> dict[str, Any]:
        assert self._strategy is not None
        swapper = self._strategy.swapper
        return {"k": swapper.k, "k_prime": swapper.k_prime, "units": len(swapper), "loads": swapper.loads}


class PaperStrategy(SingleDeviceStrategy):
    """Lightning's single-device strategy, except for the placement of the weights.

    Args:
        device: The device that blocks compute on.
        k: Number of blocks on the device at once.
        k_prime: Number of blocks copied at once.
    """

    def __init__(self, device: torch.device, k: int, k_prime: int) -> None:
        super().__init__(device)
        self.window = (k, k_prime)
        self._hooks: list[Any] = []

    @override
    def model_to_device(self) -> None:
        """Move everything outside of blocks to the device; blocks follow when they are needed."""
        assert self.model is not None
        blocks = self.model.network.blocks()
        self.swapper = Swapper(blocks, self.root_device, *self.window)
        users = Counter(module for block in blocks for module in block.modules())
        # Each module of a block needs the hook: with activation checkpointing, backward calls those and not the block.
        self._hooks = [
            module.register_forward_pre_hook(lambda *_, index=index: self.swapper.enter(index))
            for index, block in enumerate(blocks)
            for module in block.modules()
            if users[module] == 1
        ]
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor not in self.swapper:
                tensor.data = tensor.data.to(self.root_device)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.swapper.weights_looked_up():
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.swapper.direction = -1
        loss = super().backward(*args, **kwargs)
        self.swapper.direction = 1
        self.swapper.leave_all()
        return loss

    @override
    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().teardown()


class _Place(NamedTuple):
    """A weight, and the block that it is part of."""

    block: int
    parameter: nn.Parameter


class _Lookup(NamedTuple):
    """What autograd saves instead of a weight, or of a view of one."""

    place: _Place
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Swapper:
    """Moves blocks between host and device.

    Args:
        blocks: The blocks, in the order of forward.
        device: The device that they compute on.
        k: Number of blocks on the device at once.
        k_prime: Number of blocks copied at once.

    Attributes:
        direction: Direction in which blocks are used: 1 in forward, -1 in backward.
        loads: Number of blocks copied to the device so far.
        there: Indices of the blocks on the device, in the order in which they arrived.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, k: int, k_prime: int) -> None:
        self.k, self.k_prime = k, k_prime
        self.direction = 1
        self.loads = 0
        self.there: list[int] = []
        self._device = device
        users = Counter(parameter for block in blocks for parameter in block.parameters())
        self._blocks = [[weight for weight in block.parameters() if users[weight] == 1] for block in blocks]
        self._weights = {weight for block in self._blocks for weight in block}
        self._places: dict[int, _Place] = {}  # by the address of a weight on the device

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._weights

    def enter(self, index: int) -> None:
        """Make sure that a block is on the device before it computes."""
        if index in self.there:
            return
        ahead = range(index, index + self.direction * self.k_prime, self.direction)
        coming = [block for block in ahead if 0 <= block < len(self) and block not in self.there]
        for block in self.there[: max(0, len(self.there) + len(coming) - self.k)]:
            self._leave(block)
        for block in coming:
            self._come(block)

    def leave_all(self) -> None:
        """Move all blocks back to the host, unless the window has room for all of them."""
        if self.k < len(self):
            for block in list(self.there):
                self._leave(block)

    def weights_looked_up(self) -> AbstractContextManager[None]:
        """Return a context in which autograd does not save weights, but looks them up in backward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _come(self, block: int) -> None:
        for weight in self._blocks[block]:
            _move(weight, self._device)
            self._places[weight.untyped_storage().data_ptr()] = _Place(block, weight)
        self.there.append(block)
        self.loads += 1

    def _leave(self, block: int) -> None:
        for weight in self._blocks[block]:
            self._places.pop(weight.untyped_storage().data_ptr(), None)  # weights without elements share an address
            _move(weight, torch.device("cpu"))
        self.there.remove(block)

    def _pack(self, tensor: Tensor) -> Tensor | _Lookup:
        place = self._places.get(tensor.untyped_storage().data_ptr())
        if place is None or tensor.dtype != place.parameter.dtype:
            return tensor
        return _Lookup(place, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Tensor | _Lookup) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.enter(saved.place.block)
        return saved.place.parameter.data.as_strided(saved.size, saved.stride, saved.offset)


def _move(weight: nn.Parameter, device: torch.device) -> None:
    """Copy a weight and its gradient, even if source and destination are both host memory."""
    weight.data = weight.data.to(device, copy=True)
    if weight.grad is not None:
        weight.grad.data = weight.grad.data.to(device, copy=True)
