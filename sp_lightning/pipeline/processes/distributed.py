"""The processes that train the same model: broadcasts of the first one, their steps, and groups across machines.

The processes of one machine share memory (box.py). Gradients are averaged over all processes on their way from the
device (averages.py). Gradients in a parameter's own `.grad` are averaged when backward has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from sp_lightning.pipeline.processes.box import Box, written_by_follower
from sp_lightning.pipeline.torch_private import parts_of


class Processes:
    """The processes of torch's default group, each of which trains the model with data of its own.

    Args:
        on_this_machine: Number of processes on each machine, which share its memory and cores; their ranks follow each
            other.
        timeout: The longest time that a process waits for the others.

    Attributes:
        box: The processes of this machine, which share one copy of the model in CPU memory.
    """

    def __init__(self, on_this_machine: int, timeout: timedelta = default_pg_timeout) -> None:
        self.count = dist.get_world_size()
        self.machines = self.count // on_this_machine
        ranks = torch.arange(self.count).view(self.machines, on_this_machine)
        # The processes of this machine, those of equal rank on all machines, and all processes.
        self.machine_group = _group(ranks.tolist(), timeout)
        self.cross_machine_group = _group(ranks.T.tolist(), timeout)
        self._world_group = self.machine_group
        if self.machines > 1:
            self._world_group = _group([list(range(self.count))], timeout)
        self.box = Box(self.machine_group, timeout)
        # Whether gradients are averaged when a backward ends. If not, later backward passes add to them first.
        self.averages = True
        # Whether the steps of all processes belong together; they do not in evaluation.
        self.trains = True
        self.passes = 0  # the number of backward passes of all processes
        self.steps = 0  # the number of optimizer steps taken while gradients were averaged
        # The names of weights that had a gradient in any process.
        self.trained_names: set[str] = set()
        # Parameters that stay on the device, by name; each process has a copy of them.
        self.copies: Mapping[str, nn.Parameter] = {}
        # The names of copies that user code has written to in this process, as torch counts, since processes last met.
        self.written_copies: set[str] = set()
        # Whether there may have been writes that torch does not count.
        self.copies_may_differ = False
        self._seen_copies: dict[str, list[tuple[int, int]]] = {}

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Broadcast the first process's weights and buffers to all others, while they are still on the CPU.

        On each machine, all processes use the weights of the first one: the others drop theirs.

        Raises:
            ValueError: The processes have built different models.
        """
        self.steps = 0
        tensors = [*module.named_parameters(), *module.named_buffers()]
        own_model = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
        everyones = self.gather(own_model)
        for rank, others in enumerate(everyones):
            for ours, theirs in zip_longest(everyones[0], others):
                if ours != theirs:
                    raise ValueError(
                        f"Processes 0 and {rank} have built different models. The first "
                        f"difference is in {(ours or theirs)[0]!r} (names, shapes and dtypes are "
                        "compared). Build the same model in all processes."
                    )
        self.broadcast(module.buffers())
        if self.box.is_keeper and self.machines > 1:
            for weight in module.parameters():
                for part in parts_of(weight):
                    _broadcast(part, self.cross_machine_group)

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give the first process's values to all processes, on the CPU or on the GPU."""
        for tensor in tensors:
            _broadcast(tensor, self._world_group)

    def gather(self, own: Any) -> list[Any]:
        """Gather an object from each process of all machines, in the order of their ranks."""
        return self.box.gather(own, self._world_group)

    def check_edits(self, edits: Sequence[Set[str]]) -> None:
        """Raise if a process has edited weights that the first one of its machine has not, by their names."""
        for rank, edited in enumerate(edits):
            for name in edited - edits[rank - rank % self.box.count]:
                raise written_by_follower(name)

    def look_at_copies(self, changed_alike: bool = False) -> None:
        """Note writes to copies since the last look, unless all have `changed_alike`, for example by optimizers."""
        seen = {}
        for name, copy in self.copies.items():
            seen[name] = [(part._version, part.data_ptr()) for part in parts_of(copy)]
            if not changed_alike and seen[name] != self._seen_copies[name]:
                self.written_copies.add(name)
        self._seen_copies = seen

    def share_copies(self, names: Collection[str] | None = None) -> None:
        """Give the first process's values of copies to all; those of all copies if none are named."""
        for name, copy in sorted(self.copies.items()):
            if names is None or name in names:
                self.broadcast(parts_of(copy))
        self.look_at_copies(changed_alike=True)
        self.written_copies.clear()
        self.copies_may_differ = False

    @property
    def owner(self) -> int:
        """The rank of the process that owns the weights on this machine."""
        return dist.get_rank() - self.box.rank

    @property
    def is_planner(self) -> bool:
        """Whether this process plans for all; one of them does while their steps belong together."""
        return self.trains and dist.get_rank() == 0

    @torch.no_grad()
    def share(self, state: Any) -> Any:
        """Return the first process's optimizer state of a weight, which is in CPU memory, in all processes."""
        holder = [tree_map_only(Tensor, partial(torch.empty_like, device="meta"), state)]
        dist.broadcast_object_list(holder, 0, group=self._world_group)
        if dist.get_rank() != 0:
            state = tree_map_only(Tensor, partial(torch.empty_like, device="cpu"), holder[0])
        self.broadcast(leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        return state

    def begin_optimizer_step(self, optimizer: Optimizer) -> None:
        """Wait until all processes have come to the step, which one process of each machine takes for all.

        Raises:
            RuntimeError: This is a step in an evaluation, or processes have taken different numbers of steps.
            ValueError: The optimizer cannot step shared weights.
        """
        name = type(optimizer).__name__
        if not self.trains:
            raise RuntimeError(
                f"{name} updates weights in an evaluation step. Each process does so separately, but the "
                "processes of this machine share the weights. Use `Trainer(devices=1)`."
            )
        if self.averages:
            self.steps += 1
        # It is imported here, as it imports FSDP, which takes a second.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if isinstance(optimizer, torch.optim.LBFGS | ZeroRedundancyOptimizer):
            raise ValueError(
                f"{name} keeps or sends weights in each process, but the processes of this machine "
                "share their weights, and one of them updates these for all. Use another optimizer, or "
                "`Trainer(devices=1)`."
            )
        self.look_at_copies()
        self.gather_in_step(None)

    def gather_in_step(self, own: Any) -> Sequence[Any]:
        """Gather an object from each process at the same moment of a step.

        Raises:
            RuntimeError: The processes have taken different numbers of optimizer steps.
        """
        steps, everyones = zip(*self.gather((self.steps, own)), strict=True)
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"The processes have taken different numbers of optimizer steps ({list(steps)}). Each process "
                "must run backward and step equally often. `training_step` must not return None in only some "
                "of them."
            )
        return everyones

    @torch.no_grad()
    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the `.grad` of parameters, the same in all processes; a process without one has zeros.

        A `.grad` may contain averages of earlier backward passes: these are equal in all processes, so they stay.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            average = parameter.grad.contiguous().mul_(1 / self.count)
            dist.all_reduce(average, group=self._world_group)
            if average is not parameter.grad:
                parameter.grad.copy_(average)


def _group(ranks: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Make groups of ranks, and return the one of this process; it sends tensors on the host and on the device."""
    backend = dist.get_backend_config()
    if "cpu" not in backend:
        backend = f"cpu:gloo,{backend}"
    own_group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend=backend)
    return cast("dist.ProcessGroup", own_group)


def _broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    values = tensor.detach().reshape(-1).contiguous()
    # It is sent as bytes: groups cannot send every dtype.
    dist.broadcast(values.view(torch.uint8), 0, group=group)
    if dist.get_rank() != 0:
        tensor.copy_(values.view(tensor.shape))
