"""Several processes that train one model, each with data of its own and a replica of the weights.

This module does the exchange before and between steps; averaging.py averages gradients. All replicas take the same
optimizer steps, so they stay equal without any other exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline.torch_private import parts_of
from sp_lightning.pipeline.units.tree import check_parameter


class Replicas:
    """The processes of torch's default group, each with a replica of the model.

    Args:
        host_group: Group of the same processes for tensors in host memory; None if the default group takes these, too.
        on_this_machine: Number of processes that share this machine's memory and cores.
    """

    def __init__(self, host_group: dist.ProcessGroup | None = None, on_this_machine: int = 1) -> None:
        self.host_group = host_group
        self.on_this_machine = on_this_machine
        self.count = dist.get_world_size()
        # whether gradients are averaged. If not, backward passes are each process's own, and others need not run one.
        self.averages = True
        self.passes = 0  # number of backward passes that this process has taken part in
        self.steps = 0  # number of optimizer steps taken while gradients were averaged
        # the names of units, in the order in which they are averaged, which is the same in all processes
        self.order: list[str] = []

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Give numbers, equally many in all processes, to the others; return those of each."""
        message = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        answers = [torch.empty_like(message) for _ in range(self.count)]
        dist.all_gather(answers, message, group=self.host_group)
        return [answer.tolist() for answer in answers]

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Broadcast the first process's weights and buffers to all replicas, while they are still on the host.

        Raises:
            ValueError: The processes have built different models, or a weight has no values on the host.
        """
        self.steps = 0
        for name, parameter in module.named_parameters():
            check_parameter(name, parameter, on_meta=False)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        everyones: list[Any] = [None] * self.count
        # strides, too, because gradients are averaged as they lie in memory
        own = [
            (name, tuple(tensor.shape), str(tensor.dtype), isinstance(tensor, nn.Parameter) and tensor.stride())
            for name, tensor in tensors.items()
        ]
        dist.all_gather_object(everyones, own, group=self.host_group)
        for rank, others in enumerate(everyones):
            for ours, theirs in zip_longest(everyones[0], others):
                if ours != theirs:
                    raise ValueError(
                        f"Processes 0 and {rank} have built different models; the first difference is in "
                        f"{(ours or theirs)[0]!r} (names, shapes, dtypes and strides are compared). Build the same "
                        "model in all processes."
                    )
        for part in [part for tensor in tensors.values() for part in parts_of(tensor)]:
            self._broadcast([part])

    @torch.no_grad()
    def share_buffers(self, module: nn.Module) -> None:
        """Broadcast the first process's buffers to all replicas: running means are those of its data."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in module.buffers():
            alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        for buffers in alike.values():
            self._broadcast(buffers)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast the first process's values of tensors of one device and dtype, in one message."""
        group = self.host_group if tensors[0].device.type == "cpu" else None
        message = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        dist.broadcast(message.view(torch.uint8), 0, group=group)  # as bytes: groups cannot send every dtype
        if dist.get_rank() != 0:
            for tensor, values in zip(tensors, torch.split(message, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(values.view(tensor.shape))
