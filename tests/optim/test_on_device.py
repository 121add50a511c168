"""Passes by torch's operations against those of the kernels: on the CPU no bit differs, except what is in codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_lightning import optim
from sp_lightning.optim import on_device, passes
from sp_lightning.optim.layout import BLOCK
from sp_lightning.optim.on_device import Effort, step_on_device
from sp_lightning.optim.rules import Memory, Pass, Scaling, Update

from .parts import CASES, compare

pytest.importorskip("numba")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(("cls", "options", "scaling", "dtype"), CASES)
def test_no_bit_differs(cls: Any, options: Any, scaling: Any, dtype: Any, moments: str) -> None:
    compare(cls, {"moments": moments, **options}, scaling, dtype, torch.device("cpu"))


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a weight whose dimensions lie in another order."""
    monkeypatch.setattr(passes, "_run_kernels", lambda steps: [step_on_device(step) for step in steps])

    def stepped(piece: int) -> list[Tensor]:
        monkeypatch.setattr(on_device, "PIECE", piece)
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(123, 61).bfloat16().t())
        optimizer = optim.AdamW([weight])
        for _ in range(2):
            weight.grad = torch.randn(61, 123).bfloat16()
            optimizer.step()
        return [weight.detach(), *optimizer.state[weight].values()]

    assert all(torch.equal(*pair) for pair in zip(stepped(1 << 20), stepped(2 * BLOCK), strict=True))


class Kernels(TorchDispatchMode):
    """Counts operations, and the bytes of all that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith("empty"):
            self.count += 1
            read = [] if name in ("uniform_", "full_like") else tree_leaves((args, kwargs))
            written = (args[0], *args[2:4]) if name.startswith("_fused_adam") else result
            read = read[1:] if name == "copy_" else read
            self.nbytes += sum(each.nbytes for each in (*read, *tree_leaves(written)) if isinstance(each, Tensor))
        return result


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_takes_as_much_of_a_device_as_plans_count(dtype: torch.dtype, moments: str) -> None:
    """With a gradient in bf16 that is scaled, and a copy of the weights put in their place."""
    size = 8 * BLOCK
    weight, gradient, place = (torch.ones(size, dtype=kind) for kind in (dtype, torch.bfloat16, torch.bfloat16))
    copy = None if dtype == torch.bfloat16 else torch.empty_like(gradient)
    optimizer = optim.AdamW([nn.Parameter(weight)], moments=moments)
    work = passes.Work(weight, gradient, {}, copy, Scaling(np.float32(0.5)))
    (step,) = passes.passes_of(optimizer.update, optimizer.param_groups[0], [work])
    with Kernels() as kernels:
        step_on_device(step)
        place.copy_(weight if copy is None else copy)
    effort = Effort.of(has_halves=dtype == torch.bfloat16, has_codes=moments == "int8")
    assert kernels.count == effort.kernels
    assert kernels.nbytes / size == pytest.approx(effort.nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("moments", "dtype"), [("fp32", torch.bfloat16), ("int8", torch.bfloat16), ("fp32", torch.float32)]
)
def test_neighbors_are_stepped_together(moments: str, dtype: torch.dtype) -> None:
    """Twelve weights that lie one behind the other take few kernels more than one weight, and have the same bits."""

    def stepped(join: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(4 + number, BLOCK).to(dtype)) for number in range(12)]
        optimizer = optim.AdamW(weights, moments=moments)
        group = optimizer.param_groups[0]
        works = [passes.Work(weight.detach(), torch.randn_like(weight), optimizer.state[weight]) for weight in weights]
        steps = passes.passes_of(optimizer.update, group, works)
        fields = zip(*[step.memory for step in steps], strict=True)
        lying = [
            None if tensors[0] is None else torch.cat([each.reshape(-1) for each in tensors]) for tensors in fields
        ]
        sizes = [[0 if tensor is None else tensor.numel() for tensor in step.memory] for step in steps]
        begins = [0] * len(lying)
        for number, step in enumerate(steps):
            views = [
                None if all is None else all[begin : begin + size]
                for all, begin, size in zip(lying, begins, sizes[number], strict=True)
            ]
            begins = [begin + size for begin, size in zip(begins, sizes[number], strict=True)]
            steps[number] = step._replace(memory=Memory(*views))
        with Kernels() as kernels:
            for step in on_device.together(steps) if join else steps:
                step_on_device(step)
        return [tensor for tensor in lying if tensor is not None], kernels.count

    expected, many = stepped(join=False)
    actual, few = stepped(join=True)
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
    print(f"{many} kernels, together {few}")
    assert few <= many / 12 + 12


def test_separate_tensors_are_not_joined() -> None:
    """Even if the allocator has put them one behind the other."""
    memory, nbytes = bytearray(8 * 4 * BLOCK), 4 * BLOCK

    def lying(number: int) -> Memory:
        weight, gradient, first, second = (
            torch.frombuffer(memory, dtype=torch.float32, count=BLOCK, offset=(2 * place + number) * nbytes)
            for place in range(4)
        )
        return Memory(weight, None, gradient, first, second, None)

    group = optim.AdamW([nn.Parameter(torch.ones(1))]).param_groups[0]
    steps = [Pass(Update(True), group, 1.0, lying(number)) for number in range(2)]
    first, second = (step.memory.weight for step in steps)
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    assert len(on_device.together(steps)) == 2
