"""Modules of any class that Python allows, as units and as the root, train, are copied and saved like plain ones."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch import Tensor, nn

from .class_shapes import SHAPES, Counting, shaped
from .helpers import Run, assert_same_story, note_outputs, sgd
from .zoo import blocks


class Model(blocks.Chain):
    """Blocks of a class with a shape, or a root with one."""

    block: type[nn.Module] = blocks.Block

    def __init__(self) -> None:
        super().__init__(self.block() for _ in range(4))


def of_shape(base: type, block: type, shape: str) -> nn.Module:
    """An instance of a class with a shape, whose blocks have it as well."""
    made = shaped(base, shape)
    type.__setattr__(made, "block", shaped(block, shape))
    return made()


class Same(nn.Module):
    """Equals all others, as by its settings."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same)

    def __hash__(self) -> int:
        return 7

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_modules_that_equal_each_other() -> None:
    def build() -> nn.Module:
        return blocks.Chain([nn.Sequential(nn.Linear(blocks.WIDTH, blocks.WIDTH), Same()) for _ in range(4)])

    assert_same_story(lambda run: run.normal_step("step", sgd(run.model)), build, units=None)


def copies(model: nn.Module) -> list[nn.Module]:
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_a_loop(shape: str) -> None:
    """As units and as the root: the numbers, the copies in the middle of a run, and the classes are the plain ones."""
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(of_shape(Model, blocks.Block, shape))
        return made[-1]

    def story(run: Run) -> None:
        optimizer = sgd(run.model)
        for number in range(3):
            run.normal_step(f"step {number}", optimizer)
        run.evaluate("evaluation")
        for number, duplicate in enumerate(copies(run.model)):
            assert [type(part) for part in duplicate.modules()] == classes
            note_outputs(run.trace, f"copy {number}", duplicate(run.rows(5)))

    classes = [type(part) for part in build().modules()]
    Counting.heard.clear()
    assert_same_story(story, build, units=lambda name, module: isinstance(module, blocks.Block))
    assert [type(part) for part in made[-1].modules()] == classes
    assert not Counting.heard
    assert not getattr(type(made[-1]), "registry", [])
