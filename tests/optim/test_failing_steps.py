"""Whatever fails in a step: all weights take it, or nothing has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning import optim
from sp_lightning.optim import passes

from ..processes import run_python
from .parts import needs_numba

pytestmark = needs_numba


class Failing(TorchDispatchMode):
    """Fails instead of the operation of this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":
            self.left -= 1
            if self.left == -1:
                raise MemoryError(str(func))
        return func(*args, **(kwargs or {}))


def made(moments: str, steps: int = 0) -> optim.AdamW:
    """Weights of several kinds, in groups whose updates are several kinds, too."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(300).to(dtype)) for dtype in (torch.float, torch.bfloat16) * 2]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.1}]
    optimizer = optim.Adam([*groups], weight_decay=0.1, moments=moments)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def everything(optimizer: optim.AdamW) -> list[Tensor]:
    """All weights and state. Before a first step there may be none, or what it begins with, which is the same."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = [value.clone() for weight in weights for value in optimizer.state[weight].values()]
    has_begun = any(bool(value.any()) for value in state)
    return [weight.detach().clone() for weight in weights] + has_begun * state


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(map(torch.equal, left, right))


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("steps", [0, 1])
def test_any_operation_of_torch_may_fail(steps: int, moments: str) -> None:
    """In a first step, which makes state, and in a later one."""
    before = everything(made(moments, steps))
    after = everything(made(moments, steps + 1))
    failures = 0
    while True:
        optimizer = made(moments, steps)
        try:
            with Failing(failures):
                optimizer.step()
        except MemoryError:
            assert_same(everything(optimizer), before)
            optimizer.step()
            assert_same(everything(optimizer), after)
            failures += 1
            continue
        break
    assert_same(everything(optimizer), after)
    assert failures > 1


def failing(error: type[BaseException], number: int) -> Callable[..., Any]:
    """A compiler that fails from some kernel on."""
    compile_loop, left = passes.compiled_kernels().compile_loop, [number]

    def compile_or_fail(kind: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error("No space left on device")
        return compile_loop(kind)

    return compile_or_fail


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("error", [OSError, RuntimeError, MemoryError, KeyboardInterrupt])
def test_any_kernel_may_fail_to_compile(
    error: type[BaseException], number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's operations make the step then; if the user interrupts it, nothing has changed."""
    before, after = everything(made("fp32")), everything(made("fp32", 1))
    for cached in (passes.loop_of, passes._warn_that_torch_updates):
        cached.cache_clear()
    optimizer = made("fp32")
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(passes.compiled_kernels(), "compile_loop", failing(error, number))
        if error is KeyboardInterrupt:
            if number < 2:  # there are two kinds
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                assert_same(everything(optimizer), before)
        else:
            optimizer.step()
            assert_same(everything(optimizer), after)
            said = [record.getMessage() for record in caplog.records]
            assert len(said) == (number < 2)
            assert all("numba cannot compile its kernels (No space left on device)" in line for line in said)
            assert all("set NUMBA_CACHE_DIR to a folder that can be written" in line for line in said)
    passes.loop_of.cache_clear()


@pytest.mark.parametrize("has_kernels", [False, True])
def test_a_cache_that_cannot_be_written(has_kernels: bool, tmp_path: Any) -> None:
    """From the import on, or between two kinds of weights: files cannot grow, as on a full disk."""
    code = (
        "import resource, torch, sp_lightning.optim as optim\n"
        "weights = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float, torch.bfloat16)]\n"
        "for weight in weights:\n"
        "    weight.grad = torch.ones_like(weight)\n"
        f"if {has_kernels}:\n"
        "    optim.AdamW(weights[:1]).step()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
        "optimizer = optim.AdamW(weights, lr=0.1)\n"
        "for _ in range(2):\n"
        "    optimizer.step()\n"
        "assert all(weight < 0.95 for weight in torch.cat([weight.detach() for weight in weights])), weights\n"
        "assert [state['step'].item() for state in optimizer.state.values()] == [2, 2]\n"
    )
    _, said = run_python("-W", "ignore", "-c", code, NUMBA_CACHE_DIR=str(tmp_path))
    assert said.count("superpipeline: numba cannot compile its kernels") == 1
    assert "File too large" in said


def test_state_that_cannot_be_loaded_leaves_what_is_there() -> None:
    optimizer = made("fp32", 1)
    before = everything(optimizer)
    saved = deepcopy(optimizer.state_dict())
    saved["state"][3]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"The checkpoint's exp_avg has the shape \(7,\)"):
        optimizer.load_state_dict(saved)
    assert_same(everything(optimizer), before)
