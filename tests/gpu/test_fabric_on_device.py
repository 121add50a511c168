"""Fabric on the device: closely as its single-device strategy, which steps there, with weights on the host."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.optim import SGD

from sp_lightning.fabric import SuperpipelineStrategy

from ..helpers import Run, Trace, assert_close_trace, frozen, note_outputs, note_state
from ..zoo.blocks import chain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{"k": 2}, {"k": "auto", "memory_budget": "1GiB"}], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_loop_with_two_models(precision, options, tmp_path):
    """A penalty and a gradient of a gradient between forward and backward, clipping, and a file."""
    traces: list[Trace] = [{}, {}]
    for strategy, trace in zip(("auto", SuperpipelineStrategy(**options)), traces, strict=True):
        torch.manual_seed(0)
        fabric = Fabric(accelerator="gpu", devices=1, strategy=strategy, precision=precision)
        fabric.launch()
        built, teaching = chain(4), chain(2).requires_grad_(False)
        model, optimizer = fabric.setup(built, SGD(built.parameters(), lr=0.1, foreach=False))
        teacher = fabric.setup_module(teaching)
        for step in range(5):
            x = fabric.to_device(Run.rows(step)).requires_grad_()
            out = model(x)
            loss = F.mse_loss(out, teacher(x)) + 0.01 * sum(weight.square().sum() for weight in built.parameters())
            if precision == "32-true":  # else Fabric forbids it
                (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = loss + gradient.square().mean()
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            note_outputs(trace, f"{step}", [loss, norm])
        fabric.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
        trace["saved"] = frozen(fabric.load(tmp_path / "a")["model"]["blocks.0.up.weight"])
        note_state(trace, "end", built, [])
    assert_close_trace(*traces)
