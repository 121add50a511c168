"""Several processes that train one model: each has data of its own and a replica of the weights.

Gradients are averaged on the device, before they leave it, in the dtype of their masters. So every replica takes the
same optimizer steps, and they stay equal without another exchange.

[Note: whose turn it is]
What one process sends, all others have to wait for, and it must belong to the same weights everywhere. But each
follows a backward pass of its own: a layer may be left out in one of them, or a weight may have left its unit. So
before gradients are averaged, the processes tell each other which weights they have gradients of. This is a small
message between hosts, which runs ahead of the devices. They agree on one of these sets; who has no gradient of a
weight in it adds zero, and may come to it later: then it has another turn, and cannot be stepped before backward ends.
Who has ended its backward pass takes part until nobody has any gradient left.

[Note: accumulation]
As under torch's DDP, the sums of micro-batches are averaged, with the last one, and not each micro-batch: other sums
would round otherwise. So while `accumulates` is set, gradients are added up on the host of each process; with the last
micro-batch's they go to the device once more. Those that a user's hook must see, and sparse ones, are averaged in each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.pipeline.weights.parameters import check_parameter
from sp_lightning.pipeline.weights.weight import Weight

Gradients = dict[Weight, Tensor]
HandOver = Callable[[Weight], list[Tensor]]


class Replicas:
    """The processes of torch's default group, each with a replica of the model.

    Args:
        host_group: The same processes, for tensors in host memory; None if the default group takes these, too.
        on_this_machine: How many of them share this machine's memory and cores.

    Attributes:
        count: How many there are.
        accumulates: Whether another micro-batch will add to the gradients of backward passes that run now.
        passes: Backward passes that this process has taken part in.
        unaveraged: Parameters whose gradients are sums of this process alone, by identity.
    """

    def __init__(self, host_group: dist.ProcessGroup | None = None, on_this_machine: int = 1) -> None:
        self.host_group = host_group
        self.on_this_machine = on_this_machine
        self.count = dist.get_world_size()
        self.accumulates = False
        self.passes = 0
        self.unaveraged: set[int] = set()

    @torch.no_grad()
    def begin_alike(self, module: nn.Module) -> None:
        """Give all replicas the weights and buffers of the first one; all of them are on the host still.

        Raises:
            ValueError: The processes have built different models, or a weight has no values on the host.
        """
        self.unaveraged.clear()
        for name, parameter in module.named_parameters():
            check_parameter(name, parameter, on_meta=False)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
        self._check_alike(described)
        for tensor in tensors.values():
            self._broadcast([tensor])

    def _check_alike(self, described: list[tuple[str, tuple[int, ...], str]]) -> None:
        everyones: list[list[tuple[str, tuple[int, ...], str]]] = [[] for _ in range(self.count)]
        dist.all_gather_object(everyones, described, group=self.host_group)
        for rank, others in enumerate(everyones):
            if others != everyones[0]:
                differing = next(iter(set(others) ^ set(everyones[0])), None)
                what = "their order" if differing is None else f"{differing[0]!r} (shape and dtype are compared, too)"
                raise ValueError(
                    f"Processes 0 and {rank} have built different models, the first difference is in {what}. Build the "
                    "same one in all of them."
                )

    @torch.no_grad()
    def share_buffers(self, module: nn.Module) -> None:
        """Give all replicas the first one's buffers: running means are those of its data."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in module.buffers():
            alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        for buffers in alike.values():
            self._broadcast(buffers)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first process's values into all others' tensors, of one device and dtype, with one message."""
        group = self.host_group if tensors[0].device.type == "cpu" else None
        message = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        dist.broadcast(message.view(torch.uint8), 0, group=group)  # there are dtypes that groups cannot send
        if dist.get_rank() != 0:
            for tensor, values in zip(tensors, torch.split(message, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(values.view(tensor.shape))


class Averaging:
    """Averages the gradients of an arrangement's weights.

    Args:
        replicas: The processes.
        weights: All weights, in an order that is the same in all processes.
        elsewhere: Parameters that autograd itself collects gradients of, on the device.
        moment: What has to be the same in all processes whenever gradients are averaged: a number of steps.
    """

    def __init__(
        self,
        replicas: Replicas,
        weights: Iterable[Weight],
        elsewhere: Sequence[nn.Parameter],
        moment: Callable[[], int],
    ) -> None:
        self.replicas = replicas
        self._weights = list(weights)
        self._numbers = {weight: number for number, weight in enumerate(self._weights)}
        self._elsewhere = elsewhere
        self._moment = moment
        self._open: set[Weight] = set()
        self._under_way: tuple[Gradients, list[dist.Work]] | None = None

    def average(self, gradients: Mapping[Weight, Tensor], hand_over: HandOver) -> Iterator[Gradients]:
        """Have gradients averaged while backward goes on.

        Args:
            gradients: On the device. They are not changed.
            hand_over: Gives whatever else there is of a gradient: what was not averaged with earlier micro-batches.

        Yields:
            What has been averaged since the last call: as a rule what was given then.
        """
        left: dict[Weight, Tensor | None] = dict(gradients)
        while left:
            yield from self._start(self._agree(left, goes_on=True), left, hand_over)

    def finish(self, left: Iterable[Weight], hand_over: HandOver) -> Iterator[Gradients]:
        """Backward is over in this process: take part until it is over in all of them.

        Args:
            left: Weights of which there is nothing but what `hand_over` gives.
            hand_over: As in `average`.

        Yields:
            What has been averaged since the last call.
        """
        self.replicas.passes += 1
        nothing_new: dict[Weight, Tensor | None] = dict.fromkeys(left)
        while turn := self._agree(nothing_new):
            yield from self._start(turn, nothing_new, hand_over)
        yield from self._complete()
        self._open.clear()

    def is_final(self, weights: Iterable[Weight]) -> bool:
        """Whether no process can come to these weights any more in this backward pass, once their turn has come."""
        return self._open.isdisjoint(weights)

    def average_sparse(self, gradients: Mapping[Weight, list[Tensor]]) -> dict[Weight, list[Tensor]]:
        """Average sparse gradients, when backward is over in all processes.

        Args:
            gradients: For each weight what backward has brought, one after the other.
        """
        left = {weight: reduce(torch.add, parts).to("cpu") for weight, parts in gradients.items()}
        averaged = {}
        while turn := self._agree(left):
            for weight in turn:
                own = left.pop(weight, None)
                part = (_no_rows(weight) if own is None else own).coalesce() * (1 / self.replicas.count)
                dist.all_reduce(part, group=self.replicas.host_group)
                averaged[weight] = [part]
        return averaged

    def has_elsewhere(self) -> bool:
        """Whether there are gradients of parameters that are elsewhere."""
        return any(parameter.grad is not None for parameter in self._elsewhere)

    def average_elsewhere(self) -> None:
        """Average the gradients of parameters that are elsewhere, when backward is over in all processes.

        What was averaged before is in them, and is not changed by it: it is the same in all processes.
        """
        used = torch.tensor([parameter.grad is not None for parameter in self._elsewhere], dtype=torch.int32)
        if used.numel():
            dist.all_reduce(used, group=self.replicas.host_group)
        for parameter, users in zip(self._elsewhere, used.tolist(), strict=True):
            if users:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                average = (own * (1 / self.replicas.count)).contiguous()
                dist.all_reduce(average)
                parameter.grad = own.copy_(average)

    def abandon(self) -> None:
        """After an exception: nothing is on its way any more."""
        self._under_way = None
        self._open.clear()

    def _agree(self, mine: Collection[Weight], goes_on: bool = False) -> list[Weight]:
        """Whose gradients are averaged next (see the note above); nobody's when no process has any left.

        Args:
            mine: What this process has.
            goes_on: Whether its backward pass goes on and may bring more.

        Raises:
            RuntimeError: The processes are not at the same moment of the training.
        """
        has = torch.zeros(len(self._weights), dtype=torch.int32, device="cpu")
        has[[self._numbers[weight] for weight in mine]] = 1
        message = torch.cat([torch.tensor([self._moment(), goes_on], dtype=torch.int32, device="cpu"), has])
        answers = [torch.empty_like(message) for _ in range(self.replicas.count)]
        dist.all_gather(answers, message, group=self.replicas.host_group)
        moments = [int(answer[0]) for answer in answers]
        if len(set(moments)) > 1:
            raise RuntimeError(
                f"The processes have taken different numbers of optimizer steps ({moments}) when they average "
                "gradients. Every process has to run backward as often as the others between two steps; a "
                "`training_step` that returns None in one of them does not."
            )
        sets = [answer[2:].nonzero().flatten().tolist() for answer in answers]
        # backward came to its first layer last; where that is a later one, others are as far or further
        turn = max(sets, key=lambda numbers: numbers[0] if numbers else -1)
        missing = (set(turn) - set(numbers) for numbers, answer in zip(sets, answers, strict=True) if answer[1])
        self._open.update(self._weights[number] for number in set[int]().union(*missing))
        return [self._weights[number] for number in turn]

    def _start(
        self, turn: Sequence[Weight], left: dict[Weight, Tensor | None], hand_over: HandOver
    ) -> Iterator[Gradients]:
        averaged = {}
        for weight in turn:
            parts, latest = hand_over(weight), left.pop(weight, None)
            if latest is not None:
                parts.append(latest)
            own = reduce(torch.add, [part.to(weight.master.dtype) for part in parts] or [_nothing(weight)])
            averaged[weight] = (own * (1 / self.replicas.count)).contiguous()
            self.replicas.unaveraged.discard(id(weight.master))
        works = [dist.all_reduce(gradient, async_op=True) for gradient in averaged.values()]
        yield from self._complete()
        self._under_way = averaged, works

    def _complete(self) -> Iterator[Gradients]:
        if self._under_way is not None:
            (averaged, works), self._under_way = self._under_way, None
            for work in works:
                work.wait()
            yield averaged


def _nothing(weight: Weight) -> Tensor:
    """The part of a process that has not used a weight."""
    return torch.zeros(weight.host.shape, dtype=weight.master.dtype, device=weight.twin.data.device)


def _no_rows(weight: Weight) -> Tensor:
    """The same of a sparse gradient."""
    rows, *columns = weight.host.shape
    values = torch.empty(0, *columns, dtype=weight.master.dtype)
    return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), values, (rows, *columns))
