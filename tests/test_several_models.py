"""Several models, each with its own pipeline: in one step, or by turns, with the numbers of training alone."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial

import pytest
import several_models
import torch
from torch.optim import SGD

import sp_lightning
from sp_lightning.pipeline import Pipeline, PipelineOptions

from .helpers import Run, attached, same
from .simulated import MACHINES, STEP_BYTES, UNIT_BYTES, WIDTH, SimulatedBackend, TimedBlock
from .zoo.blocks import Chain, chain

UNITS, STEPS = 10, 2
GAINS = {
    "gradients are the slowest": 1.25,
    "the optimizer is the slowest": 1.2,
    "the optimizer falls behind in backward": 1.5,
}
SIZES = ["--layers=3", "--hidden=16", "--heads=2", "--batch-size=4", "--steps=5"]
SMALL = [*SIZES, "--lr", "1e-2", "3e-2", "--accelerator=cpu"]


def train(name: str, *seeds: int) -> tuple[float, list[list[float]]]:
    """Train models by turns on one simulated device: milliseconds of a step of all, and the losses of each."""
    machine = MACHINES[name]
    backend = SimulatedBackend(UNIT_BYTES / machine.up, UNIT_BYTES / machine.down, STEP_BYTES / machine.step)
    runs = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = Chain(TimedBlock(WIDTH, backend, machine.forward, machine.backward) for _ in range(UNITS))
        pipe = Pipeline(model, "cpu", options=PipelineOptions(2, 1, units=[TimedBlock]), backend=backend)
        runs.append((model, pipe, SGD(model.parameters(), lr=1e-2), []))
    for step in range(2 + STEPS):
        if step == 2:  # the order of the units is known
            begin = backend.now
        for model, pipe, optimizer, losses in runs:
            with pipe.step():
                loss = model(torch.ones(1, WIDTH)).square().sum()
                loss.backward()
            pipe.optimizers.clipping.clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    end = backend.now
    for _, pipe, _, _ in runs:
        pipe.detach()
    return (end - begin) / STEPS, [losses for _, _, _, losses in runs]


@pytest.mark.parametrize(("name", "gain"), GAINS.items())
def test_one_computes_while_another_is_stepped(name, gain):
    """A step that is clipped by norm begins when all gradients are there, so a model alone would wait for it."""
    alone = [train(name, seed) for seed in range(2)]
    seconds, losses = train(name, *range(2))
    assert losses == [each for _, of_one in alone for each in of_one]
    one_after_the_other = sum(each for each, _ in alone)
    print(f"\n{name}: by turns {seconds:.1f} ms, one after the other {one_after_the_other:.1f} ms")
    assert one_after_the_other > gain * seconds


@pytest.mark.parametrize("scopes", [1, 2])
@pytest.mark.parametrize("trained", [True, False])
def test_operations_over_weights_of_two(trained, scopes):
    """A distance of weights (L2-SP, a teacher's), with gradients to both, in a step of both or of the first alone."""
    results = [[], []]
    for seen in results:
        torch.manual_seed(0)
        models = chain(4), chain(4).requires_grad_(trained)
        with ExitStack() as stack:
            pipes = [stack.enter_context(attached(model)) for model in models if seen is results[1]]
            for step in range(3):
                pairs = list(zip(*(model.parameters() for model in models), strict=True))
                with ExitStack() as scope:
                    for pipe in pipes[:scopes]:
                        scope.enter_context(pipe.step())
                    distance = sum((a - b).square().sum() + (b * a).sum() for a, b in pairs)
                    (models[0](Run.rows(step)).square().mean() + distance).backward()
                for a, b in pairs:
                    seen += [a.grad.clone(), b.grad]
                    a.data.sub_(a.grad, alpha=0.1)
                    b.data.mul_(0.9)
                    a.grad = b.grad = None
    assert all(map(same, *results))


def test_the_example(monkeypatch, capsys):
    plain = several_models.alone(several_models.parse([*SMALL, "--strategy=auto"]))
    assert all(losses[-1] < 0.95 * losses[0] for losses in plain)
    assert several_models.main([*SMALL, "--steps=2"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"by_turns: 2 models, 2 steps each, in .* s\nalone: .* s\n", output)
    assert output.endswith("Losses are the same in both orders: True\n")
    monkeypatch.setattr(sp_lightning, "superpipeline", partial(sp_lightning.superpipeline, debug=True))
    assert several_models.by_turns(several_models.parse(SMALL)) == plain


def test_the_example_refuses(capsys):
    with pytest.raises(SystemExit):
        several_models.main(["--devices=2"])
    assert "this plain loop is for one device" in capsys.readouterr().err
