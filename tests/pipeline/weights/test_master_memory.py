"""Masters keep their memory from one arrangement to the next, if others hold it or nothing has changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sp_lightning.pipeline.weights.buffers import tensor_in
from sp_lightning.pipeline.weights.host import GroupHost
from sp_lightning.pipeline.weights.master_memory import MasterMemory
from sp_lightning.pipeline.weights.weight import Weight

from ..parts import RecordingBackend


class Arrangements:
    """Arranges weights in one group after the other, as a pipeline that divides its units anew does."""

    def __init__(self, *tensors: Tensor) -> None:
        self.parameters = [nn.Parameter(tensor) for tensor in tensors]
        self.memory = MasterMemory()
        self.backend = RecordingBackend(can_pin=True)

    def arrange(self, *groups: tuple[int, ...]) -> list[GroupHost]:
        """Make groups of the parameters with these indices."""
        hosts = []
        for group in groups:
            weights = [Weight(str(index), self.parameters[index]) for index in group]
            hosts.append(GroupHost(weights, self.backend, True, self.memory))
            self.memory.keep(hosts[-1].rooms, self.backend)
        self.memory.release_all_but([room for host in hosts for room in host.rooms])
        return hosts


def test_masters_whose_memory_others_hold_do_not_move() -> None:
    """Only they stay where they are, and only for as long as somebody holds them."""
    made = Arrangements(*(torch.randn(number) for number in (5, 0, 7)))
    made.arrange((0, 1), (2,))
    held = made.parameters[0].data
    where = [parameter.data_ptr() for parameter in made.parameters]
    (host,) = made.arrange((2, 1, 0))
    assert held.data_ptr() == made.parameters[0].data_ptr() == where[0]
    assert made.parameters[2].data_ptr() != where[2]
    assert host.sends_copies
    for tensor in (held, made.parameters[2].data):
        state = host.state()
        tensor.mul_(2)
        assert host.has_changed(state)
    sent = host.prepare(host.state())
    for weight, offset in zip(host.weights, host.source_offsets, strict=True):
        assert torch.equal(tensor_in(sent, offset, weight.master, weight.compute_dtype), weight.master)
    made.arrange((0, 1), (2,))
    assert made.parameters[0].data_ptr() == where[0]
    del held, tensor
    (host,) = made.arrange((0, 1, 2))
    assert not host.sends_copies
    assert made.parameters[0].data_ptr() == host.source.bytes.data_ptr() != where[0]


def test_masters_that_travelled_with_one_that_was_replaced_do_not_move_if_others_hold_them() -> None:
    made = Arrangements(torch.randn(5), torch.randn(7))
    (host,) = made.arrange((0, 1))
    held = made.parameters[0].data
    made.memory.leave(host.weights[1])
    made.arrange((0, 1))
    assert held.data_ptr() == made.parameters[0].data_ptr()
