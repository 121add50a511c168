"""The stream of gradients of one of several processes, which are averaged before they leave the device.

They are averaged in the staging buffer in which they leave, in the dtype of their masters, in each micro-batch.

[Note: the order of units]
A collective operation makes every process wait for the others, and must be for the same weights in all of them. So all
of them average units in one order, that of the module, from its end. A unit that is complete earlier waits for its
turn. A message before the first one makes sure that all processes are about to average the same. When a process's own
backward has ended, it averages what is left, with zeros for what it has not reached. Then all tell each other which
weights they have reached: others keep no gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from sp_lightning.pipeline.gradients.buffers import GradientMemory
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.unit_gradients import IS_TRAINED, Gradient, UnitGradients
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import parts_of
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.weights.window import Window


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
            ValueError: The processes have built different models.
        """
        self.steps = 0
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


_NONE, _DENSE, _SPARSE = range(3)  # kinds of gradients


class AveragedStream(GradientStream):
    """Brings averages of gradients to the host; a process's own while `Replicas.averages` is off."""

    def __init__(
        self,
        units: Sequence[Unit],
        window: Window,
        backend: Backend,
        stats: Stats,
        replicas: Replicas,
        module: nn.Module,
        unmanaged: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(units, window, backend, stats)
        self._replicas = replicas
        self._unmanaged = unmanaged
        # alike in all processes, each of which may expect to use units in another order; residents' turn is last
        places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
        self._numbered = sorted(
            (unit for unit in self._units if unit.gradients),
            key=lambda unit: (not unit.unit.resident, min(places[id(each.weight.master)] for each in unit.gradients)),
            reverse=True,
        )
        weights = [[(weight.name, str(weight.dtype)) for weight in unit.unit.weights] for unit in self._numbered]
        self._signature = zlib.crc32(repr(weights).encode())
        self._due: dict[UnitGradients, None] | None = None  # whose turn is yet to come, in the pass that is running
        self._complete: set[UnitGradients] = set()
        self._under_way: tuple[UnitGradients, GradientMemory, list[dist.Work]] | None = None

    # ------------------------------------------------------------------------------------------- while backward runs

    def _begin_pass(self) -> dict[UnitGradients, None]:
        """Make sure that all processes are at the same point, and return the units whose turn is yet to come.

        Raises:
            RuntimeError: They have taken different numbers of optimizer steps, or have different units.
        """
        if self._due is None:
            steps, signatures = zip(*self._replicas.exchange([self._replicas.steps, self._signature]), strict=True)
            if len(set(steps)) > 1:
                raise RuntimeError(
                    f"The processes have taken different numbers of optimizer steps ({list(steps)}) when they average "
                    "gradients. Every process has to run backward equally often between two steps: `training_step` "
                    "may not return None in some of them only."
                )
            if len(set(signatures)) > 1:
                raise RuntimeError(
                    "The processes have different units, as some of them use a weight outside of its module that "
                    "others do not. Name it in `resident=`."
                )
            self._due = dict.fromkeys(unit for unit in self._numbered if any(map(IS_TRAINED, unit.gradients)))
        return self._due

    @override
    def collect(self, weight: Weight, tensor: Tensor, is_last: bool) -> None:
        gradient = self.of[weight]
        if self._replicas.averages:
            if gradient.unit not in self._begin_pass():
                raise RuntimeError(
                    f"A weight of {gradient.unit.unit.name!r} got another gradient in a backward pass in which all of "
                    "the unit's had come, and were averaged. Use checkpoints with `use_reentrant=False`."
                )
            earlier = gradient.on_device
            if earlier is not None:
                gradient.on_device = earlier.to(weight.dtype) + tensor
                return
        super().collect(weight, tensor, is_last)

    @override
    @torch.no_grad()
    def send(self, unit: UnitGradients, is_last: bool) -> None:
        """Start averaging a unit that is complete, and those that it has kept waiting, each when its turn comes."""
        if not self._replicas.averages:
            super().send(unit, is_last)
            return
        if unit.gathered < len(unit.trained):
            return  # it has its turn when all have come, or when backward ends
        self._complete.add(unit)
        for due in list(self._begin_pass()):
            if due not in self._complete:
                break
            self._start(due)

    def _start(self, unit: UnitGradients) -> None:
        """Put a unit's gradients together, zeros where there is none, and start averaging them."""
        self._send_averaged()
        self._begin_pass().pop(unit)
        self._gathering.pop(unit, None)
        staging = self.staging.take(unit.layout.nbytes)
        for gradient, view in zip(unit.trained, staging.views(unit.layout)[0], strict=True):
            if gradient.on_device is None:
                view.zero_()
            else:
                view.copy_(gradient.on_device)
            gradient.on_device = None
        unit.gathered = 0
        flats = unit.layout.flat_in(staging.bytes)
        torch._foreach_mul_(flats, 1 / self._replicas.count)
        self._under_way = unit, staging, [dist.all_reduce(flat, async_op=True) for flat in flats]

    def _send_averaged(self) -> None:
        """Send the unit whose gradients are being averaged, as computing waits for that."""
        if self._under_way is None:
            return
        unit, staging, works = self._under_way
        self._under_way = None
        for work in works:
            work.wait()
        self._dispatch(unit, unit.trained, unit.layout, staging, is_last=unit in self._complete)

    # ------------------------------------------------------------------------------------------------ when it ends

    @override
    def finish(self, takes_part: bool = False) -> None:
        """Average what is left in the order of all processes, and take back what none of them has a gradient of.

        Unless all take part, a process does so only if a gradient has arrived in it: `torch.autograd.grad` in some
        processes does not concern the others.
        """
        has_some = self.arrived or any(parameter.grad is not None for parameter in self._unmanaged)
        if self._replicas.averages and (takes_part or has_some):
            self._average_rest()
        super().finish()

    @torch.no_grad()
    def _average_rest(self) -> None:
        own = set(self.arrived)
        for unit in list(self._begin_pass()):
            if not unit.gathered:
                unit.begin()
            for gradient in unit.trained:
                if gradient.on_device is None:
                    self.arrived[gradient] = gradient.host is None
            self._start(unit)
        self._send_averaged()
        reached = self._agree(own)
        for gradient in [gradient for gradient in self.arrived if gradient not in reached]:
            gradient.late.clear()
            if self.arrived.pop(gradient):
                gradient.unit.forget([gradient])

    def _agree(self, own: Collection[Gradient]) -> set[Gradient]:
        """Tell the others which weights this process has reached, average parameters that are not managed.

        Returns:
            What any process has reached.
        """
        self._replicas.passes += 1
        gradients = [gradient for unit in self._numbered for gradient in unit.gradients]
        flags = [*(gradient in own for gradient in gradients), *map(_kind_of_gradient, self._unmanaged)]
        answers = self._replicas.exchange(flags)
        reached = [max(of_all) for of_all in zip(*answers, strict=True)]
        self._forget_pass()
        self._average_unmanaged(reached[len(gradients) :])
        return {gradient for gradient, flag in zip(gradients, reached, strict=False) if flag}

    def _average_unmanaged(self, kinds: Sequence[int]) -> None:
        """Average the gradients of parameters on the device that any process has one of.

        They may contain gradients of earlier micro-batches. Averaging does not change those, as they are the same in
        all processes.
        """
        if _SPARSE in kinds:
            raise RuntimeError("Sparse gradients are not averaged over processes. Let the layer have `sparse=False`.")
        for parameter in [parameter for parameter, kind in zip(self._unmanaged, kinds, strict=True) if kind]:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            average = (own * (1 / self._replicas.count)).contiguous()
            dist.all_reduce(average)
            parameter.grad = own.copy_(average)

    def _forget_pass(self) -> None:
        self._due = None
        self._complete.clear()

    @override
    def abandon(self) -> None:
        self._under_way = None
        self._forget_pass()
        super().abandon()


def _kind_of_gradient(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return _NONE
    return _DENSE if parameter.grad.layout is torch.strided else _SPARSE
