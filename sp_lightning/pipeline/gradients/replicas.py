"""Several processes that train one model, each with data of its own and a replica of the weights.

This module does the exchange before and between steps; averaging.py averages gradients. All replicas take the same
optimizer steps, so they stay equal without any other exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline.torch_private import parts_of
from sp_lightning.pipeline.units.tree import check_parameter

_Description = tuple[str, tuple[int, ...], str, tuple[int, ...]]  # name, shape, dtype, strides


class Replicas:
    """The processes of torch's default group, each with a replica of the model.

    Args:
        host_group: Group of the same processes for tensors in host memory; None if the default group takes these, too.
        on_this_machine: Number of processes that share this machine's memory and cores.

    Attributes:
        count: Number of processes.
        averages: Whether gradients are averaged. If not, backward passes are each process's own, and others need not
            run one.
        passes: Number of backward passes that this process has taken part in.
        order: The names of units, in the order in which they are averaged, which is the same in all processes.
    """

    def __init__(self, host_group: dist.ProcessGroup | None = None, on_this_machine: int = 1) -> None:
        self.host_group = host_group
        self.on_this_machine = on_this_machine
        self.count = dist.get_world_size()
        self.averages = True
        self.passes = 0
        self.order: dict[str, None] = {}

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Broadcast the first process's weights and buffers to all replicas, while they are still on the host.

        Raises:
            ValueError: The processes have built different models, or a weight has no values on the host.
        """
        for name, parameter in module.named_parameters():
            check_parameter(name, parameter, on_meta=False)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        described = [
            # strides, too, because gradients are averaged as they lie in memory
            (name, tuple(t.shape), str(t.dtype), t.stride() if isinstance(t, nn.Parameter) else ())
            for name, t in tensors.items()
        ]
        self._check_alike(described)
        for part in [part for tensor in tensors.values() for part in parts_of(tensor)]:
            self._broadcast([part])

    def _check_alike(self, described: list[_Description]) -> None:
        everyones: list[list[_Description]] = [[] for _ in range(self.count)]
        dist.all_gather_object(everyones, described, group=self.host_group)
        for rank, others in enumerate(everyones):
            if others != everyones[0]:
                differing = next(iter(set(others) ^ set(everyones[0])), None)
                what = (
                    "their order"
                    if differing is None
                    else f"{differing[0]!r} (names, shapes, dtypes and strides are compared)"
                )
                raise ValueError(
                    f"Processes 0 and {rank} have built different models; the first difference is in {what}. Build the "
                    "same model in all processes."
                )

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
