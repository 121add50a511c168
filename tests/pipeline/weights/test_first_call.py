"""Until a pipeline is first used, modules have their own classes, and calls go through it all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # before the test that patches `nn.Module.__call__`, as dynamo notes what stands there
from torch import Tensor, nn

from sp_lightning.pipeline import Pipeline
from tests.helpers import attached
from tests.zoo.blocks import WIDTH, Block, Chain, chain

PLAIN_CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert nn.Module.__call__ is PLAIN_CALL


def three_blocks() -> Chain:
    torch.manual_seed(0)
    return chain(3)


def rows() -> Tensor:
    return torch.ones(2, WIDTH)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def are_same(left: list[type], right: list[type]) -> bool:
    """Whether classes are identical; a gate equals its plain class."""
    return all(one is other for one, other in zip(left, right, strict=True))


def use_by_call(model: nn.Module, pipe: Pipeline) -> None:
    model(rows())


def use_by_call_of_a_part(model: nn.Module, pipe: Pipeline) -> None:
    model.blocks[1](rows())


def use_by_step(model: nn.Module, pipe: Pipeline) -> None:
    with pipe.step():
        pass


@pytest.mark.parametrize("use", [use_by_call, use_by_call_of_a_part, use_by_step])
def test_classes_change_with_the_first_use(use: Callable[[nn.Module, Pipeline], None]) -> None:
    model = three_blocks()
    own = classes(model)
    with attached(model) as pipe:
        assert are_same(classes(model), own)
        assert nn.Module.__call__ is not PLAIN_CALL
        use(model, pipe)
        assert not are_same(classes(model), own)
        assert classes(model) == own
        assert nn.Module.__call__ is PLAIN_CALL
    assert are_same(classes(model), own)


def test_a_pipeline_that_is_never_used() -> None:
    model = three_blocks()
    expected = model(rows())
    with attached(model):
        assert torch.equal(nn.Identity()(rows()), rows()), "modules of others are called as always"
    assert torch.equal(model(rows()), expected)


def test_the_first_call_streams() -> None:
    """Of the model as a whole, which opens one step; its parts do not open one each."""
    expected = three_blocks()(rows())
    model = three_blocks()
    with attached(model) as pipe:
        assert torch.equal(model(rows()), expected)
        assert pipe.stats.loads == 3
        assert pipe.stats.steps == 1


def test_units_that_are_arranged_anew_before_the_first_call() -> None:
    model = three_blocks()
    with attached(model) as pipe:
        model.blocks.append(copy.deepcopy(model.blocks[0]))
        expected = copy.deepcopy(model)(rows())
        pipe.rebuild()
        assert torch.equal(model(rows()), expected)
        assert pipe.stats.loads == 4


def test_two_pipelines_of_which_one_is_not_used() -> None:
    """The other one's calls pass what watches for the first call once, and not twice."""

    class Doubling(Block):
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * super().__call__(x)

    def build() -> Chain:
        torch.manual_seed(0)
        return Chain([Doubling(), Doubling()])

    expected, model = build()(rows()), build()
    with attached(three_blocks()) as unused, attached(model) as used:
        for _ in range(3):
            assert torch.equal(model(rows()), expected)
        assert used.stats.loads > 0
        assert unused.stats.steps == 0
        assert nn.Module.__call__ is not PLAIN_CALL


def test_a_model_that_is_compiled_before_the_first_call() -> None:
    """`torch.compile` keeps the method that it finds."""
    expected = three_blocks()(rows())
    model = three_blocks()
    with attached(model, debug=True) as pipe:
        compiled = torch.compile(model, backend="eager")
        for step in range(1, 4):
            assert torch.equal(compiled(rows()), expected)
            assert pipe.stats.steps == step


def test_another_patch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a profiler, say, that was there before, or came after."""
    seen: list[str] = []

    def patch(name: str) -> None:
        inner: Any = nn.Module.__call__

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "__call__", call)

    expected, model = three_blocks()(rows()), three_blocks()
    patch("before")
    with attached(model):
        patch("after")
        for _ in range(3):
            assert torch.equal(model(rows()), expected)
            assert {"before", "after"} <= set(seen)
            seen.clear()
    monkeypatch.undo()
