"""The callback prints a plan and an outcome, changes nothing, and says when it is of no use."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from sp_lightning import SuperpipelineCallback
from sp_lightning.callback import outcome
from sp_lightning.pipeline import Stats, Summary

from .lightning_modules import Base, assert_same_training, fit, loader, plain, streamed, trainer


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.message for record in caplog.records if record.levelno == logging.INFO]


def test_changes_nothing():
    assert_same_training(arguments=lambda: {"callbacks": SuperpipelineCallback()})


def test_prints_plan_and_outcome_of_a_fit(messages):
    ours = trainer(streamed(), callbacks=SuperpipelineCallback())
    fit(ours, Base())
    texts = messages()
    outcomes = [text for text in texts if "unit loads" in text]
    assert len(outcomes) == 1
    assert "saved" in outcomes[0]
    plans = [text for text in texts if "k_prime" in text or "units" in text]
    assert plans
    assert texts.index(plans[0]) < texts.index(outcomes[0])


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_prints_plan_and_outcome_of_an_evaluation(messages, entry):
    ours = trainer(streamed(), callbacks=SuperpipelineCallback())
    getattr(ours, entry)(Base(), loader(2))
    assert sum("unit loads" in text for text in messages()) == 1


@pytest.mark.filterwarnings("ignore")
def test_says_that_it_does_nothing_under_another_strategy(messages):
    ours = trainer(plain(), callbacks=SuperpipelineCallback())
    with pytest.warns(UserWarning, match="does nothing.*runs `SingleDeviceStrategy`"):
        fit(ours, Base())
    assert not [text for text in messages() if "unit loads" in text]


def test_outcome_in_numbers():
    summary = Summary(
        device="cuda:0",
        units=8,
        k=2,
        k_prime=1,
        model_bytes=4 << 30,
        device_bytes=1 << 30,
        gradient_bytes=0,
        resident=(),
        resident_bytes=0,
        host_bytes=4 << 30,
        host_gradient_bytes=1 << 30,
        optimizer_bytes=8 << 30,
        host_activation_bytes=0,
        parameters=1 << 30,
        unit_names=(),
        unit_bytes=(),
        lowered=0,
        pinned=True,
    )
    text = outcome(Stats(steps=5, loads=40, bytes_to_device=8 << 30, bytes_to_host=2 << 20, misses=1), summary)
    assert text == (
        "Superpipeline: 5 steps, 40 unit loads, 8.0 GiB to the device, 2.0 MiB back; 1 loads came late, 0 were"
        " repeated.\nWeights on cuda:0: at most 1.0 GiB of 4.0 GiB (75% saved).\n"
        "On the host: weights 4.0 GiB, gradients 1.0 GiB, optimizer 8.0 GiB; 13.0 bytes per parameter."
    )
    assert "(0% saved)" in outcome(Stats(), replace(summary, model_bytes=0))
