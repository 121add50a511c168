"""A logger that draws the model (`log_graph=True`) traces it, which is possible only while it is plain."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .lightning_modules import WIDTH, Base, Notes, assert_same_training, fit, loader, plain, streamed, trainer


class Drawing(Notes):
    """As Lightning's `TensorBoardLogger(log_graph=True)`, without TensorBoard."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[str] = []

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        inputs = model._apply_batch_transfer_handler(model.example_input_array)
        training = model.training
        model.eval()
        graph = str(torch.jit.trace(model, inputs).inlined_graph)
        self.graphs.append(re.sub(r"___torch_mangle_\d+\.", "", graph))  # torch numbers the classes that it makes
        model.train(training)


class Drawn(Base):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.Sequential(*self.blocks)(x))


def test_the_graph_is_that_of_plain_training() -> None:
    drawings: list[Drawing] = []

    def arguments() -> dict[str, Any]:
        drawings.append(Drawing())
        return {"logger": drawings[-1]}

    assert_same_training(Drawn, arguments=arguments)
    expected, *others = [drawing.graphs for drawing in drawings]
    assert len(expected) == 1
    assert others == [expected, expected]


def test_each_run_logs_one() -> None:
    drawing, module = Drawing(), Drawn()
    ours = trainer(streamed(), logger=drawing)
    fit(ours, module)
    ours.test(module, loader(1), verbose=False)
    assert len(drawing.graphs) == 2
    fit(trainer(plain(), logger=drawing), module)
    assert len(drawing.graphs) == 3


class Failing(Drawn):
    def on_fit_start(self) -> None:
        raise RuntimeError("not yet")


def test_a_run_that_fails_before_lightning_asks_for_the_graph() -> None:
    drawing = Drawing()
    with pytest.raises(RuntimeError, match="not yet"):
        fit(trainer(streamed(), logger=drawing), Failing())
    fit(trainer(streamed(), logger=drawing), Drawn())
    assert len(drawing.graphs) == 2
    fit(trainer(plain(), logger=drawing), Drawn())
    assert len(drawing.graphs) == 3


def test_other_loggers_are_left_alone() -> None:
    notes = Notes()
    with pytest.raises(RuntimeError, match="not yet"):
        fit(trainer(streamed(), logger=notes), Failing())
    assert "log_graph" not in vars(notes)


def test_a_function_that_the_user_has_put_in_place_stays() -> None:
    drawing, asked = Drawing(), []
    drawing.log_graph = asked.append
    fit(trainer(streamed(), logger=drawing), Drawn())
    assert len(asked) == 1
    assert drawing.log_graph == asked.append
