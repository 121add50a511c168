"""Passes by torch's operations against those of the kernels: on the CPU no bit differs, except what is in codes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_lightning import optim
from sp_lightning.optim import on_device, one_kernel, passes
from sp_lightning.optim.layout import BLOCK, GROUP
from sp_lightning.optim.on_device import Effort, step_on_device
from sp_lightning.optim.passes import run
from sp_lightning.optim.rules import Memory, Pass, Scaling, Update

from .parts import CASES, assert_near, assert_same_bits, begin_step, compare, needs_numba

pytestmark = needs_numba


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(("cls", "options", "scaling", "dtype"), CASES)
def test_no_bit_differs(cls: Any, options: Any, scaling: Any, dtype: Any, moments: str) -> None:
    compare(cls, {"moments": moments, **options}, scaling, dtype, torch.device("cpu"))


@pytest.mark.parametrize("case", range(4))
def test_one_kernel_is_near(monkeypatch: pytest.MonkeyPatch, case: int) -> None:
    """As inductor compiles it for the CPU: in all formats, for whole groups, and the rest by torch's operations."""
    forget_kernels(monkeypatch)
    cls, options, scaling, dtype = CASES[(1, 5, 2, 4)[case]]
    moments = "int8" if case > 1 else "fp32"
    if moments == "int8" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("inductor writes vector code for this kernel that it cannot compile on a CPU without AVX2")
    compare(cls, {"moments": moments, **options}, scaling, dtype, torch.device("cpu"), is_one=True)
    assert all(one_kernel._KERNELS.values())
    assert len(one_kernel._KERNELS) == (1 if dtype == torch.bfloat16 else 2), "gradients come in both dtypes"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_kernel_takes_any_number_of_groups_anywhere(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Of one weight or several, in one memory, whatever the surroundings: it is not compiled again."""
    compiled = []
    compile_one = one_kernel._compile
    forget_kernels(monkeypatch)
    monkeypatch.setattr(one_kernel, "_compile", lambda *layout: compiled.append(layout) or compile_one(*layout))
    for sizes in [[1], [7, 2, 1], [64]]:
        steps, memory = steps_in_line([GROUP * size for size in sizes], "int8", dtype)
        expected, by_kernels = steps_in_line([GROUP * size for size in sizes], "int8", dtype)
        run(expected)
        (step,) = on_device.together(steps)
        on_device.compile_for([step])
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            step_on_device(step)
        moved = memory.second.int() - by_kernels.second.int()
        assert abs(moved.float().mean()) < 3 * len(moved) ** -0.5, "the noise is even"
        assert_near(memory, by_kernels)
    assert len(compiled) == 1
    assert one_kernel.is_possible()


def test_without_a_compiler_torchs_operations_update(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once, and the log has one line."""
    forget_kernels(monkeypatch)
    monkeypatch.setattr(one_kernel, "_compile", lambda *_: [][1])
    for moments in ("int8", "fp32"):
        steps, memory = steps_in_line([4 * GROUP + 3], moments, torch.bfloat16)
        on_device.compile_for(steps)
        step_on_device(*steps)
        monkeypatch.setattr(one_kernel, "_WITHOUT", {"cpu"})
        expected, theirs = steps_in_line([4 * GROUP + 3], moments, torch.bfloat16)
        step_on_device(*expected)
        assert_same_bits(memory, theirs)
    (record,) = caplog.records
    assert "cannot compile updates on the GPU (IndexError: list index out of range)" in record.getMessage()


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Lion])
@pytest.mark.parametrize("gradient", [1e19, -1e21, 3e38])
def test_one_huge_gradient_is_the_same_on_both(
    gradient: float, kind: type[optim.AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its square is infinite in FP32. With int8 moments, it slows a group down for a while, and stops nothing."""

    def trained(steps: int) -> Tensor:
        weight = nn.Parameter(torch.ones(300))
        optimizer = kind([weight], lr=0.1, betas=(0.9, 0.5), moments="int8")
        for number in range(steps):
            weight.grad = torch.ones_like(weight)
            if number == 0:
                weight.grad[0] = gradient
            optimizer.step()
        assert all(value.isfinite().all() for value in optimizer.state[weight].values())
        return weight.detach()

    by_kernels = trained(3)
    assert (trained(500)[1:128] < by_kernels[1:128] - 1).all(), "the others of its group go on"
    monkeypatch.setattr(passes, "loop_of", lambda *_: None)
    torch.testing.assert_close(trained(3), by_kernels, rtol=1e-5, atol=1e-5)
    assert abs(by_kernels[0]) < 3


def test_steps_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was not compiled before is missing: torch's operations update, and the next plan knows."""
    forget_kernels(monkeypatch)
    steps, memory = steps_in_line([4 * GROUP], "fp32", torch.bfloat16)
    expected, by_kernels = steps_in_line([4 * GROUP], "fp32", torch.bfloat16)
    with monkeypatch.context() as patched:
        patched.setattr(one_kernel, "_compile", lambda *_: pytest.fail("it compiles in a step"))
        step_on_device(*steps)
    run(expected)
    assert_same_bits(memory, by_kernels)
    monkeypatch.setattr(one_kernel, "_compile", lambda *_: lambda *tensors: None)
    assert not one_kernel.is_possible()
    on_device.compile_for(steps)
    assert one_kernel.is_possible()


def test_one_thread_compiles_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)
    at_work, compiled = threading.Lock(), []

    def compile_slowly(operations: Any, device: Any, dtypes: Any) -> Any:
        assert at_work.acquire(blocking=False)
        time.sleep(0.02)
        compiled.append(dtypes)
        at_work.release()
        return print

    monkeypatch.setattr(one_kernel, "_compile", compile_slowly)
    steps = [steps_in_line([GROUP], moments, torch.float32)[0] for moments in ("fp32", "int8")]
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(on_device.compile_for, steps[number % 2]) for number in range(8)]:
            done.result()
    assert len(compiled) == 2


def test_kernels_load_vectors_and_have_one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor is told that memory is aligned, and leaves nothing to the first launch."""
    asked: list[Any] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, examples, options: asked.append((examples, options)))
    steps, _ = steps_in_line([GROUP], "int8", torch.bfloat16)
    _, dtypes = one_kernel.layout_of(steps[0])
    one_kernel._compile(on_device.operate, torch.device("cpu"), dtypes)
    ((examples, options),) = asked
    assert [example.storage_offset() for example in examples] == [0] * len(examples)
    assert all(type(example.storage_offset()) is int for example in examples)
    assert {type(example.shape[0]) for example in examples if example.dim()} == {torch.SymInt}
    assert options["triton.autotune_pointwise"] is False
    is_there = {"deterministic", "eager_numerics.division_rounding"} & {*torch._inductor.list_options()}
    assert options.keys() >= is_there


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a weight whose dimensions lie in another order."""
    monkeypatch.setattr(passes, "loop_of", lambda *_: None)

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


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel was compiled yet, and the CPU counts as a device that has them."""
    monkeypatch.setattr(one_kernel, "_WITHOUT", set())
    monkeypatch.setattr(one_kernel, "_KERNELS", {})


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
def test_a_pass_takes_as_much_of_a_device_as_plans_count(
    dtype: torch.dtype, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a gradient in bf16 that is scaled, and a copy of the weights put in their place."""
    monkeypatch.setattr(one_kernel, "_KERNELS", {})
    at_best = Effort.of(has_halves=dtype == torch.bfloat16, has_codes=moments == "int8")
    monkeypatch.setattr(one_kernel, "_WITHOUT", {"cpu", "cuda"})
    size = 8 * BLOCK
    weight, gradient, place = (torch.ones(size, dtype=kind) for kind in (dtype, torch.bfloat16, torch.bfloat16))
    copy = None if dtype == torch.bfloat16 else torch.empty_like(gradient)
    optimizer = optim.AdamW([nn.Parameter(weight)], moments=moments)
    work = passes.Work(weight, gradient, {}, copy, Scaling(np.float32(0.5)))
    (step,) = begin_step(optimizer, [work])
    with Kernels() as kernels:
        step_on_device(step)
        place.copy_(weight if copy is None else copy)
    effort = Effort.of(has_halves=dtype == torch.bfloat16, has_codes=moments == "int8")
    assert kernels.count == effort.kernels
    assert kernels.nbytes / size == pytest.approx(effort.nbytes, rel=0.05)
    # one kernel reads and writes each number once
    once = sum(tensor.nbytes for tensor in step.memory._replace(copy=None) if tensor is not None)
    once += sum(tensor.nbytes for tensor in step.memory._replace(gradient=None) if tensor is not None)
    if at_best != effort:
        assert at_best.nbytes == math.ceil(once / size) + 4


def steps_in_line(sizes: Sequence[int], moments: str, dtype: torch.dtype) -> tuple[list[Pass], Memory]:
    """Passes over weights that lie one behind the other, and all of their memory."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
    optimizer = optim.AdamW(weights, moments=moments)
    works = [passes.Work(weight.detach(), torch.randn_like(weight), optimizer.state[weight]) for weight in weights]
    steps = begin_step(optimizer, works)
    fields = [*zip(*[step.memory for step in steps], strict=True)]
    lying = [None if tensors[0] is None else torch.cat(tensors) for tensors in fields]
    parts = [
        [None] * len(steps) if whole is None else whole.split([tensor.numel() for tensor in tensors])
        for whole, tensors in zip(lying, fields, strict=True)
    ]
    memories = [Memory(*views) for views in zip(*parts, strict=True)]
    return [step._replace(memory=memory) for step, memory in zip(steps, memories, strict=True)], Memory(*lying)


@pytest.mark.parametrize(
    "sizes", [[(4 + n) * BLOCK for n in range(12)], [1, 64, 127, 1600, 128, 1280, 0, 256, 64, 128]]
)
@pytest.mark.parametrize(
    ("moments", "dtype"),
    [("fp32", torch.bfloat16), ("int8", torch.bfloat16), ("int8", torch.float32), ("fp32", torch.float32)],
)
def test_neighbors_are_stepped_together(moments: str, dtype: torch.dtype, sizes: list[int]) -> None:
    """Twelve weights in a line take few kernels more than one weight; weights of any sizes have the same bits."""

    def stepped(how: Callable[[list[Pass]], Any]) -> tuple[Memory, int]:
        steps, memory = steps_in_line(sizes, moments, dtype)
        with Kernels() as kernels:
            how(steps)
        return memory, kernels.count

    expected, many = stepped(lambda steps: [*map(step_on_device, steps)])
    actual, few = stepped(lambda steps: [*map(step_on_device, on_device.together(steps))])
    assert_same_bits(actual, expected)
    assert few < many
    assert few <= many / 12 + 12 or sizes[0] == 1
    by_kernels, _ = stepped(run)
    (assert_near if moments == "int8" else assert_same_bits)(actual, by_kernels)


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
