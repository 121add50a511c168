"""The processes that train the same model: what the first gives to all, their steps, and averages of their gradients.

Those of one machine add gradients up in memory that they share (turns.py). All others are averaged here when backward
has ended, on the host, in the dtype of the masters: of parameters that stay on the device, of several machines, and
where no memory can be shared. One follows the other in the order of their names, and a message before tells which
weights any process has a gradient of: others keep none.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.unit_gradients import Gradient
from sp_lightning.pipeline.lanes.box import find_box
from sp_lightning.pipeline.torch_private import parts_of

_NOT_SHARED = torch.optim.LBFGS, ZeroRedundancyOptimizer


class Replicas:
    """The processes of torch's default group, each of which trains the model with data of its own.

    Args:
        host_group: Group of the same processes for tensors in host memory; None if the default group takes these, too.
        on_this_machine: Number of processes that share this machine's memory and cores.
        timeout: How long one waits for the others.

    Attributes:
        box: Those of this machine, which have one copy of the model's host memory; None if each has one of its own.
    """

    def __init__(
        self,
        host_group: dist.ProcessGroup | None = None,
        on_this_machine: int = 1,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        self.box = find_box(on_this_machine, timeout)
        self.host_group = host_group
        self.on_this_machine = on_this_machine
        self.count = dist.get_world_size()
        # whether averages are complete when a backward ends, with those of earlier ones; if not, more is added up
        self.averages = True
        self.trains = True  # whether the steps of all processes belong together; not in evaluation
        self.passes = 0  # number of backward passes of all processes
        self.steps = 0  # number of optimizer steps taken while gradients were averaged

    @property
    def share_all(self) -> bool:
        """Whether all processes share memory, as they are those of one machine."""
        return self.box is not None and self.box.count == self.count

    @property
    def sums_in_box(self) -> bool:
        """Whether the processes add their gradients up in memory that they share."""
        return self.trains and self.share_all

    @property
    def owns_shared(self) -> bool:
        """Whether this process owns weights that others of its machine have, too."""
        return self.box is not None and self.box.is_keeper

    @property
    def follows(self) -> bool:
        """Whether another process of this machine owns the weights and steps them."""
        return self.box is not None and not self.box.is_keeper

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Broadcast the first process's weights and buffers to all others, while they are still on the host.

        Not the weights if all share the memory of the first one's: the others drop theirs.

        Raises:
            ValueError: The processes have built different models.
        """
        self.steps = 0
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        everyones: list[Any] = [None] * self.count
        own = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
        dist.all_gather_object(everyones, own, group=self.host_group)
        for rank, others in enumerate(everyones):
            for ours, theirs in zip_longest(everyones[0], others):
                if ours != theirs:
                    raise ValueError(
                        f"Processes 0 and {rank} have built different models; the first difference is in "
                        f"{(ours or theirs)[0]!r} (names, shapes and dtypes are compared). Build the same model in "
                        "all processes."
                    )
        due = module.buffers() if self.share_all else tensors.values()
        for part in [part for tensor in due for part in parts_of(tensor)]:
            self.broadcast(part)

    @torch.no_grad()
    def share_buffers(self, module: nn.Module) -> None:
        """Broadcast the first process's buffers to all replicas: running means are those of its data."""
        for buffer in module.buffers():
            self.broadcast(buffer)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor) -> None:
        """Give all processes the first one's values, on the host or on the device."""
        group = self.host_group if tensor.device.type == "cpu" else None
        values = tensor.detach().reshape(-1).contiguous()
        dist.broadcast(values.view(torch.uint8), 0, group=group)  # as bytes: groups cannot send every dtype
        if dist.get_rank() != 0:
            tensor.copy_(values.view(tensor.shape))

    def begin_optimizer_step(self, optimizer: Optimizer) -> None:
        """Wait until all processes of this machine have come to the step, as one of them takes it for all.

        Raises:
            RuntimeError: This cannot be a step of all, or they have taken different numbers of steps.
            ValueError: The optimizer cannot be one that steps shared weights.
        """
        self.steps += self.averages and self.trains
        if self.box is None:
            return
        name = type(optimizer).__name__
        if not self.trains:
            raise RuntimeError(
                f"{name} is to step weights in an evaluation step, which is each process's own, but the processes of "
                "this machine share them. Do so with `Trainer(devices=1)`."
            )
        if isinstance(optimizer, _NOT_SHARED):
            raise ValueError(
                f"{name} keeps or sends weights in a way of its own, and the processes of this machine share theirs, "
                "as one of them steps for all. Use another optimizer, or `Trainer(devices=1)`."
            )
        self.box.meet(self.steps)

    @torch.no_grad()
    def average(self, parameters: Mapping[str, nn.Parameter], landed: Mapping[int, Gradient]) -> None:
        """Average gradients, which have landed; that of a process without one is zero.

        They may contain averages of earlier backward passes, which are the same in all processes, so that they stay.

        Args:
            parameters: The parameters, by name; the same in all processes.
            landed: The gradients that the engine has of them, by the identities of the parameters.

        Raises:
            RuntimeError: The processes have taken different numbers of optimizer steps, or a gradient is sparse.
        """
        if not parameters:
            return
        found = {name: landed[id(p)].host if id(p) in landed else p.grad for name, p in parameters.items()}
        own = {name: gradient for name, gradient in found.items() if gradient is not None}
        for name in self._names_of_all(own):
            parameter = parameters[name]
            average = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
            if name in own:
                average.copy_(own[name]).mul_(1 / self.count)
            dist.all_reduce(average, group=self.host_group)
            if id(parameter) in landed:
                landed[id(parameter)].replace(average)
            elif name in own:
                own[name].copy_(average)
            else:
                parameter.grad = torch.empty_like(parameter).copy_(average)

    def _names_of_all(self, gradients: dict[str, Tensor]) -> list[str]:
        """Return the names of the weights that any process has a gradient of, in the same order in all of them."""
        sparse = any(gradient.layout is not torch.strided for gradient in gradients.values())
        everyones: list[Any] = [None] * self.count
        dist.all_gather_object(everyones, (self.steps, sparse, list(gradients)), group=self.host_group)
        steps, are_sparse, names = zip(*everyones, strict=True)
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"The processes have taken different numbers of optimizer steps ({list(steps)}) when they average "
                "gradients. Every process has to run backward equally often between two steps: `training_step` "
                "may not return None in some of them only."
            )
        if any(are_sparse):
            raise RuntimeError("Sparse gradients are not averaged over processes. Let the layer have `sparse=False`.")
        return sorted(set().union(*names))
