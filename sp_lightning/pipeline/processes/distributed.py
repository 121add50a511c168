"""The processes that train the same model: what the first gives to all, their steps, and what crosses machines.

Those of one machine share memory (box.py), in which they add gradients up (turns.py). The sums of several
machines are added up by the first process of each when backward has ended, on the host, in the dtype of the masters.
One follows the other in the order of their names, and a message before tells which weights any machine has a gradient
of: others keep none. So are, between all processes, gradients of parameters that stay on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from sp_lightning.pipeline.processes.box import Box
from sp_lightning.pipeline.torch_private import parts_of

_NOT_SHARED = torch.optim.LBFGS, ZeroRedundancyOptimizer


class Processes:
    """The processes of torch's default group, each of which trains the model with data of its own.

    Args:
        on_this_machine: Number of processes on each machine, which share its memory and cores; their ranks follow each
            other.
        timeout: How long one waits for the others.

    Attributes:
        box: Those of this machine, which have one copy of the model's host memory.
    """

    def __init__(self, on_this_machine: int, timeout: timedelta = default_pg_timeout) -> None:
        self.count = dist.get_world_size()
        own, _ = dist.new_subgroups(on_this_machine, timeout=timeout, backend="gloo")
        self.box = Box(own, timeout)
        self.machines = self.count // on_this_machine
        self._everyone = _group(range(self.count), timeout)
        self._first_ones = _group(range(0, self.count, on_this_machine), timeout)  # of each machine
        # whether averages are complete when a backward ends, with those of earlier ones; if not, more is added up
        self.averages = True
        self.trains = True  # whether the steps of all processes belong together; not in evaluation
        self.passes = 0  # number of backward passes of all processes
        self.steps = 0  # number of optimizer steps taken while gradients were averaged
        # sums of gradients that this process has added up with theirs
        self.bytes_to_other_machines = 0

    @property
    def sums_are_complete(self) -> bool:
        """Whether sums of gradients are complete in backward, when each process of this machine has had its turn."""
        return self.trains and self.averages and self.machines == 1

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Broadcast the first process's weights and buffers to all others, while they are still on the host.

        On each machine, the weights of the first process are those of all: the others drop theirs.

        Raises:
            ValueError: The processes have built different models.
        """
        self.steps = 0
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        own = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
        everyones = _gather(own, self._everyone)
        for rank, others in enumerate(everyones):
            for ours, theirs in zip_longest(everyones[0], others):
                if ours != theirs:
                    raise ValueError(
                        f"Processes 0 and {rank} have built different models; the first difference "
                        f"is in {(ours or theirs)[0]!r} (names, shapes and dtypes are compared). "
                        "Build the same model in all processes."
                    )
        self.broadcast(module.buffers())
        if self.box.is_keeper and self.machines > 1:
            for weight in module.parameters():
                for part in parts_of(weight):
                    _broadcast(part, self._first_ones)

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the first one's values, on the host or on the device."""
        for tensor in tensors:
            _broadcast(tensor, self._group_for(tensor))

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """Return the group of all processes that sends such tensors: on the device, torch's default group."""
        return self._everyone if tensor.device.type == "cpu" else None

    def gather(self, own: Any) -> list[Any]:
        """Return what each process of all machines has given, in the order of their ranks."""
        return self.box.gather(own) if self.machines == 1 else _gather(own, self._everyone)

    @property
    def owner(self) -> int:
        """The rank of the process that owns the weights on this machine."""
        return dist.get_rank() - self.box.rank

    @property
    def plans(self) -> bool:
        """Whether this process plans for all, which is so while their steps belong together."""
        return self.trains and dist.get_rank() == 0

    @torch.no_grad()
    def share(self, state: Any) -> Any:
        """Return the first process's state of a weight, which lies on the host, in all processes."""
        holder = [tree_map_only(Tensor, partial(torch.empty_like, device="meta"), state)]
        dist.broadcast_object_list(holder, 0, group=self._everyone)
        if dist.get_rank() != 0:
            state = tree_map_only(Tensor, partial(torch.empty_like, device="cpu"), holder[0])
        self.broadcast(each for each in tree_leaves(state) if isinstance(each, Tensor))
        return state

    def begin_optimizer_step(self, optimizer: Optimizer) -> None:
        """Wait until all processes of this machine have come to the step, as one of them takes it for all.

        Raises:
            RuntimeError: This cannot be a step of all, or they have taken different numbers of steps.
            ValueError: The optimizer cannot be one that steps shared weights.
        """
        if self.averages and self.trains:
            self.steps += 1
        name = type(optimizer).__name__
        if not self.trains:
            raise RuntimeError(
                f"{name} is to step weights in an evaluation step, which is each process's own, "
                "but the processes of this machine share them. Do so with `Trainer(devices=1)`."
            )
        if isinstance(optimizer, _NOT_SHARED):
            raise ValueError(
                f"{name} keeps or sends weights in a way of its own, and the processes of this "
                "machine share theirs, as one of them steps for all. Use another optimizer, or "
                "`Trainer(devices=1)`."
            )
        self.box.meet(self.steps)

    @torch.no_grad()
    def average_on_device(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Average the gradients of parameters that stay on the device; that of a process without one is zero.

        They may contain averages of earlier backward passes, which are the same in all processes, so that they stay.

        Raises:
            RuntimeError: The processes have taken different numbers of optimizer steps, or a gradient is sparse.
        """
        if not parameters:
            return
        own: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                own[name] = parameter.grad
        for name in self._names_of_all(own, self._everyone):
            parameter = parameters[name]
            if name not in own:
                own[name] = parameter.grad = torch.zeros_like(parameter)
            average = own[name].contiguous().mul_(1 / self.count)
            dist.all_reduce(average, group=self._group_for(average))
            if average is not own[name]:
                own[name].copy_(average)

    @torch.no_grad()
    def add_up_machines(self, sums: Mapping[str, Tensor], own: Collection[str]) -> list[str]:
        """Add the sums of this machine's processes up with those of others; done by the first process of each.

        Returns:
            The names of those that any machine has a gradient of; `own` are those that this one has.

        Raises:
            RuntimeError: The machines have taken different numbers of optimizer steps, or trained different weights.
        """
        names = self._names_of_all({name: sums[name] for name in own}, self._first_ones)
        for name in names:
            if name not in sums:
                raise RuntimeError(f"Weight {name!r} is frozen here and has a gradient on another machine.")
            if name not in own:
                sums[name].zero_()
            dist.all_reduce(sums[name], group=self._first_ones)
            self.bytes_to_other_machines += sums[name].nbytes
        return names

    def _names_of_all(self, gradients: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
        """Return the names of the weights that any process has a gradient of, in the same order in all of them."""
        sparse = any(gradient.layout is not torch.strided for gradient in gradients.values())
        everyones = _gather((self.steps, sparse, list(gradients)), group)
        steps, are_sparse, names = zip(*everyones, strict=True)
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"The processes have taken different numbers of optimizer steps ({list(steps)}) "
                "when they average gradients. Every process has to run backward equally often "
                "between two steps: `training_step` may not return None in some of them only."
            )
        if any(are_sparse):
            raise RuntimeError("Sparse gradients are not averaged over processes. Let the layer have `sparse=False`.")
        return sorted(set().union(*names))


def _group(ranks: Iterable[int], timeout: timedelta) -> dist.ProcessGroup:
    """Make a group for tensors in host memory; all processes have to ask for the same ones."""
    return cast("dist.ProcessGroup", dist.new_group(list(ranks), timeout=timeout, backend="gloo"))


def _gather(own: Any, group: dist.ProcessGroup) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    return everyones


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    values = tensor.detach().reshape(-1).contiguous()
    # as bytes: groups cannot send every dtype
    dist.broadcast(values.view(torch.uint8), 0, group=group)
    if dist.get_rank() != 0:
        tensor.copy_(values.view(tensor.shape))
