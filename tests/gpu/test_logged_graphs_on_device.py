"""A logger that draws the model traces it on the host, where its weights are, though it will compute on the device."""

from __future__ import annotations

import pytest

from sp_lightning import SuperpipelineStrategy

from ..lightning_modules import fit, trainer
from ..test_logged_graphs import Drawing, Drawn

pytestmark = pytest.mark.gpu


def test_the_model_and_its_example_are_on_one_device() -> None:
    drawing = Drawing()
    fit(trainer(SuperpipelineStrategy(k=2), accelerator="gpu", devices=1, logger=drawing), Drawn())
    (graph,) = drawing.graphs
    assert "device=cpu" in graph
    assert "device=cuda" not in graph
