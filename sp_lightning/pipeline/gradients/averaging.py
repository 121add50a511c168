"""The processes that train the same model, and the averages of their gradients.

Gradients are averaged when backward has ended, on the host, in the dtype of the masters: those of one weight after the
other, in the order of their names. A message before tells which weights any process has a gradient of: others keep
none.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.torch_private import parts_of


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
        # Whether gradients are averaged when a backward ends, those of earlier ones included. If not, it is this
        # process's own, and others need not run one.
        self.averages = True
        self.passes = 0  # number of backward passes after which they were
        self.steps = 0  # number of optimizer steps taken while gradients were averaged

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Broadcast the first process's weights and buffers to all replicas, while they are still on the host.

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
        for part in [part for tensor in tensors.values() for part in parts_of(tensor)]:
            self._broadcast(part)

    @torch.no_grad()
    def share_buffers(self, module: nn.Module) -> None:
        """Broadcast the first process's buffers to all replicas: running means are those of its data."""
        for buffer in module.buffers():
            self._broadcast(buffer)

    def _broadcast(self, tensor: Tensor) -> None:
        group = self.host_group if tensor.device.type == "cpu" else None
        values = tensor.detach().reshape(-1).contiguous()
        dist.broadcast(values.view(torch.uint8), 0, group=group)  # as bytes: groups cannot send every dtype
        if dist.get_rank() != 0:
            tensor.copy_(values.view(tensor.shape))

    @torch.no_grad()
    def average(self, module: nn.Module, stream: GradientStream) -> None:
        """Average gradients, which have landed; that of a process without one is zero.

        They may contain averages of earlier backward passes, which are the same in all processes, so that they stay.

        Raises:
            RuntimeError: The processes have taken different numbers of optimizer steps, or a gradient is sparse.
        """
        self.passes += 1
        ours = {id(each.weight.master): each for each in stream.of.values() if each.host is not None}
        parameters = dict(module.named_parameters())
        found = {name: ours[id(p)].host if id(p) in ours else p.grad for name, p in parameters.items()}
        own = {name: gradient for name, gradient in found.items() if gradient is not None}
        for name in self._names_of_all(own):
            parameter = parameters[name]
            average = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
            if name in own:
                average.copy_(own[name]).mul_(1 / self.count)
            dist.all_reduce(average, group=self.host_group)
            if id(parameter) in ours:
                ours[id(parameter)].replace(average)
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
