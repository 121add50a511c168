"""Compact optimizers over weights on the device: the numbers of the kernels, and checkpoints of the host."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sp_lightning import optim
from sp_lightning.optim import on_device, one_kernel, passes
from sp_lightning.optim.on_device import BYTES_MEANWHILE
from sp_lightning.optim.one_kernel import layout_of
from sp_lightning.optim.passes import Work, run
from sp_lightning.optim.rules import Scaling
from sp_lightning.pipeline import Engine, WindowPlan
from sp_lightning.planning.planner import compile_updates

from ..lightning_modules import fit_placed
from ..optim.parts import CASES, begin_step, compare
from ..planning.parts import Fixed
from ..second_device import IN_USE, some

pytest.importorskip("numba")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(("cls", "options", "scaling", "dtype"), some(CASES, 3))
@pytest.mark.parametrize("is_one", [False, True])
def test_it_steps_as_the_kernels_do(
    cls: Any, options: Any, scaling: Any, dtype: Any, moments: str, is_one: bool, device: torch.device, monkeypatch: Any
) -> None:
    """To rounding: the update is torch's code for the device, or compiled."""
    monkeypatch.setattr(one_kernel, "_WITHOUT", {"cpu"} if is_one else {"cpu", device.type})
    compare(cls, {"moments": moments, **options}, scaling, dtype, device, is_one)


@pytest.mark.skipif(IN_USE, reason="the second device has no driver for Triton")
def test_a_kernel_has_one_configuration(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its first launch would choose, by the time of a small update."""
    from torch._inductor.runtime import triton_heuristics
    from torch._inductor.utils import fresh_cache

    configurations: list[int] = []
    autotune = triton_heuristics.cached_autotune
    monkeypatch.setattr(
        triton_heuristics,
        "cached_autotune",
        lambda hints, configs, *given, **named: (
            configurations.append(len(configs)),
            autotune(hints, configs, *given, **named),
        )[1],
    )
    monkeypatch.setattr(one_kernel, "_KERNELS", {})
    with fresh_cache():
        for moments in ("fp32", "int8"):
            optim.AdamW([nn.Parameter(torch.zeros(8, device=device))], moments=moments).compile_updates(device, ())
    assert configurations == [1, 1]


class Compiles(Fixed):
    """Compiles updates where it wants another window for the last time, as `AutoPlanner` does."""

    def before_step(self, engine: Engine, builds_graph: bool) -> WindowPlan | None:
        if len(self._windows) == 2:
            compile_updates(engine)
        return super().before_step(engine, builds_graph)


@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.01, 2)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "16-mixed"])
def test_plans_compile_what_steps_ask_for(
    precision: str, clip: float | None, accumulate: int, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether gradients add up or not, and whether they are clipped."""
    compiled: set[Any] = set()
    asked: set[Any] = set()
    monkeypatch.setattr(on_device, "compile_kernel", lambda operations, layout: compiled.add(layout))
    monkeypatch.setattr(on_device, "run_as_one_kernel", lambda step, seed: asked.add(layout_of(step)))
    planner = Compiles((2,), (2,), (2,), (2, (), (1, 2, 4)))
    _, stats = fit_placed(partial(optim.AdamW, lr=1e-2), planner, precision, clip, accumulate, accelerator)
    assert stats.visits
    assert asked
    assert asked <= compiled


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_step_takes_meanwhile(dtype: torch.dtype, moments: str, factor: float, cuda: torch.device) -> None:
    """No more than is planned for each element, scaled or not."""
    weight = nn.Parameter(torch.randn(1 << 18, device=cuda).to(dtype))
    weight.grad = torch.randn_like(weight)
    optimizer = optim.AdamW([weight], moments=moments)
    optimizer.step()
    work = Work(weight.detach(), weight.grad, optimizer.state[weight], None, Scaling(np.float32(factor)))
    passes = begin_step(optimizer, [work])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(passes)
    assert torch.cuda.max_memory_allocated() - before <= 1.01 * BYTES_MEANWHILE * weight.numel()


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_a_checkpoint_moves(moments: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the device and back. There no numba is needed, and steps are counted on the host."""
    host = made([torch.randn(31, 17).t().bfloat16(), torch.randn(1000).bfloat16()], "cpu", moments)
    step(host)
    monkeypatch.setattr(
        passes, "compiled_kernels", lambda: pytest.fail("an update on the device asked for numba's kernels")
    )
    there = made(host.param_groups[0]["params"], device, moments)
    there.load_state_dict(deepcopy(host.state_dict()))
    assert_same(host, there)
    step(there)
    monkeypatch.undo()
    back = made(there.param_groups[0]["params"], "cpu", moments)
    back.load_state_dict(deepcopy(there.state_dict()))
    assert_same(back, there)


def made(weights: list[Tensor], device: Any, moments: str) -> optim.AdamW:
    copies = [nn.Parameter(weight.detach().to(device, copy=True)) for weight in weights]
    return optim.AdamW(copies, lr=1e-2, moments=moments)


def step(optimizer: optim.AdamW) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape).bfloat16().to(parameter.device)
    optimizer.step()


def assert_same(host: optim.AdamW, other: optim.AdamW) -> None:
    """Weights, masters and state."""
    for p, q in zip(host.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q.cpu())
        assert torch.equal(host.master(p), other.master(q).cpu())
        assert all(torch.equal(value, other.state[q][name].cpu()) for name, value in host.state[p].items())
        assert all(value.device == (p if name == "step" else q).device for name, value in other.state[q].items())
