"""The callback measures and draws, a run says its plan and its outcome; nothing changes, and none is silent in vain."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary

from sp_lightning import SuperpipelineCallback
from sp_lightning.callback import PREFIX, unlike_the_plan
from sp_lightning.pipeline import Lane, Stats, Summary, WindowPlan
from sp_lightning.timeline import Breakdown
from sp_lightning.trainer.narrator import outcome, planned

from .lightning_modules import Base, Notes, assert_same_training, fit, loader, plain, streamed, trainer

SUMMARY = Summary(
    device="cuda:0", units=28, k=2, parameters=1 << 30, model_bytes=4 << 30, device_bytes=1 << 30,
    gradient_bytes=0, host_bytes=4 << 30, host_gradient_bytes=1 << 30, optimizer_bytes=8 << 30, lowered=0, pinned=True,
    unit_names=tuple(map(str, range(28))), resident=(), living=(), visiting=(), plan=None, on_drive=(0, 0),
)  # fmt: skip


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.message for record in caplog.records if record.levelno == logging.INFO]


@pytest.mark.filterwarnings("ignore")
def test_says_that_it_does_nothing_under_another_strategy(messages):
    ours = trainer(plain(), callbacks=SuperpipelineCallback())
    with pytest.warns(UserWarning, match="does nothing.*runs `SingleDeviceStrategy`"):
        fit(ours, Base())
    assert not [text for text in messages() if "unit loads" in text]


def test_outcome_in_numbers():
    stats = Stats(steps=24, loads=40, bytes_to_device=8 << 30, bytes_to_host=2 << 20, misses=1)
    assert outcome(stats, SUMMARY) == (
        "superpipeline: 24 batches, 40 unit loads (1 late), 8.0 GiB to cuda:0, 2.0 MiB back. "
        "Weights needed at most 1.0 GiB on cuda:0; weights, gradients and optimizer state need 13.0 GiB of CPU memory, "
        "13.0 bytes per parameter."
    )
    plan = WindowPlan(2, on_device=("0", "1"), on_device_bytes=1 << 30, visiting=("2",))
    assert "units that stay on the GPU: 2 (1.0 GiB), streamed units that are updated on the GPU" in planned(plan)
    assert f"k={3 * plan.k}," in planned(plan, k_prime=3)


# --------------------------------------------------------------------------------------------- with and without one


def test_without_the_callback_the_trainer_logs_and_checkpoints_are_plain(tmp_path):
    """The Trainer, its loggers and its checkpoints have what plain training gives them."""

    def run(strategy, folder) -> list[object]:
        notes = Notes()
        shows = {"enable_model_summary": True, "logger": notes, "log_every_n_steps": 1}
        saves = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, save_last=True)]}
        run = trainer(strategy, **shows, **saves, default_root_dir=folder)
        fit(run, Base())
        saved = torch.load(folder / "last.ckpt", weights_only=False)
        return [
            [type(callback) for callback in run.callbacks],
            [(step, values.keys()) for step, values in notes.lines],
            *[metrics.keys() for metrics in (run.callback_metrics, run.logged_metrics, run.progress_bar_metrics)],
            saved.keys(),
            [key.partition("{")[0] for key in saved["callbacks"]],
        ]

    assert run(streamed(), tmp_path / "ours") == run(plain(), tmp_path / "plain")


@pytest.mark.parametrize("entry", ["fit", "predict"])
@pytest.mark.parametrize(
    ("callback", "model_summary", "told"),
    [
        (False, True, ["CPU memory for weights", "unit loads"]),
        (False, False, []),
        (True, False, ["CPU memory for weights", "A step takes", "unit loads"]),
    ],
    ids=["with a model summary", "without", "with a callback"],
)
def test_a_run_prints_its_plan_and_its_outcome(messages, entry, callback, model_summary, told):
    callbacks = [*[ModelSummary()] * model_summary, *[SuperpipelineCallback()] * callback]
    run = trainer(streamed(), enable_model_summary=model_summary, callbacks=callbacks)
    getattr(run, entry)(Base(), loader(2))
    kinds = ["CPU memory for weights", "unit loads", "A step takes"]
    assert [kind for text in messages() for kind in kinds if kind in text] == told


def test_a_plan_is_printed_once(messages):
    """By the same Trainer; what came of a run is said as long as the plan is new."""
    told = []
    run = trainer(streamed(), callbacks=[ModelSummary()], enable_model_summary=True)
    for entry in ["predict", "predict", "test", "fit"]:
        before = len(messages())
        getattr(run, entry)(Base(), loader(2))
        said = "\n".join(messages()[before:])
        told.append(("CPU memory for weights" in said, "unit loads" in said))
    nothing, everything = (False, False), (True, True)  # what optimizers do is new in the first fit
    assert told == [everything, nothing, nothing, everything]


# ----------------------------------------------------------------------------------------------------------- metrics


def documented_metrics():
    """The names in the two tables of docs/timeline.md: of those that are counted, and of those that are timed."""
    text = (Path(__file__).parents[1] / "docs" / "timeline.md").read_text(encoding="utf-8")
    tables = text.split("| metric | meaning |")[1:]
    return [set(re.findall(r"^\| `superpipeline/(\w+)` \| .+ \|$", table, re.MULTILINE)) for table in tables]


def test_metrics_of_a_fit():
    """Those in the documentation: counters whenever Lightning logs, times when a step was recorded.

    What the user logs stays as it is.
    """
    notes, plain_notes = Notes(), Notes()
    arguments = {"max_epochs": 4, "log_every_n_steps": 4}
    trainer(plain(), logger=plain_notes, **arguments).fit(Base(), loader(6), loader(2))
    run = trainer(streamed(k=2), logger=notes, callbacks=SuperpipelineCallback(), **arguments)
    run.fit(Base(), loader(6), loader(2))  # the last four steps are in one epoch
    lines = notes.ours()
    assert [step for step, _ in lines] == [3, 7, 11, 15, 19, 23]
    names = [{name.removeprefix(PREFIX) for name in values} for _, values in lines]
    counted, timed = documented_metrics()
    assert counted | timed in names
    assert all(found in (counted, counted | timed) for found in names)
    others = [(step, values) for step, values in notes.lines if (step, values) not in lines]
    assert [(step, set(values)) for step, values in others] == [(s, set(v)) for s, v in plain_notes.lines]
    assert not [name for name in {**run.callback_metrics, **run.logged_metrics} if "superpipeline" in name]
    last = {name.removeprefix(PREFIX): value for name, value in lines[-1][1].items()}
    assert last["loads"] == 2 * 4 - 2  # four blocks in two slots; the head is small, and resident
    assert last["heals"] == last["late_loads"] == 0
    timed = next(values for _, values in lines if PREFIX + "overlap" in values)
    assert 0 <= timed[PREFIX + "overlap"] <= 1
    assert 0 < timed[PREFIX + "compute_share"] <= 1
    assert timed[PREFIX + "step_seconds"] > timed[PREFIX + "stall_seconds"] >= 0
    assert all(math.isfinite(value) for _, values in lines for value in values.values())


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [({"accumulate_grad_batches": 3, "log_every_n_steps": 1}, [0, 1, 2, 3]), ({"log_every_n_steps": 0}, [])],
    ids=["accumulated batches are one step", "nothing where Lightning logs nothing"],
)
def test_when_metrics_are_logged(arguments, steps):
    notes = Notes()
    fit(trainer(streamed(), logger=notes, callbacks=SuperpipelineCallback(), **arguments), Base())
    assert [step for step, _ in notes.ours()] == steps


def test_the_chosen_window_is_printed_once(messages):
    """Also without a summary."""
    ours, module = trainer(streamed(k="auto", memory_budget="1GiB")), Base()
    for _ in range(2):
        ours.predict(module, loader())
    (said,) = [text for text in messages() if "chosen by the first steps" in text]
    assert re.match(r"superpipeline: chosen .*: k=\d.*\. A step should take .* of GPU memory\.", said)


# ------------------------------------------------------------------------------------------------ timeline, diagnosis


def test_the_timeline_of_a_fit(tmp_path, messages):
    """One picture of the steps asked for, and at the end a diagnosis with its evidence."""
    path = tmp_path / "new" / "timeline.html"
    assert_same_training(
        arguments=lambda: {"callbacks": SuperpipelineCallback(path, timeline_steps=2), "max_epochs": 3}, k=2, k_prime=1
    )
    text = path.read_text(encoding="utf-8")
    assert "Base, fit, k=2, cpu" in text
    assert '"name": "blocks.0", "cat": "forward"' in text
    assert '"steps": 2' in text
    said, _ = [text for text in messages() if text.startswith("A step takes")]  # of two streamed runs
    assert "Layers compute" in said


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (1.0, ""),
        (0.9, ""),
        (1.4, " The plan expected 1.40 s."),
        (0.5, " The plan expected 500 ms, limited by copies; most of the difference is waits for weights."),
        (0.0, ""),
    ],
)
def test_a_step_unlike_its_plan(expected, said):
    numbers = Breakdown(0.0, 2.0, 2, {Lane.COMPUTE: 1.2}, {}, 0.7, {"weights": 0.6, "optimizer": 0.1}, 1.0)
    plan = WindowPlan(2, step_seconds=3 * expected, bottleneck=Lane.TO_DEVICE)
    assert unlike_the_plan(numbers, plan, batches=3) == said


@pytest.mark.parametrize("entry", ["validate", "predict"])
def test_the_timeline_of_an_evaluation(tmp_path, entry):
    run = trainer(streamed(), callbacks=SuperpipelineCallback(tmp_path / "a.json"))
    getattr(run, entry)(Base(), loader(6))
    events = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"forward", "load", "step"} <= kinds
    assert "backward" not in kinds


def test_a_timeline_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "a.html").mkdir()
    for path, reason in {"file/a.html": "exists|directory", "a.html": "directory"}.items():
        run = trainer(streamed(), max_epochs=1, callbacks=SuperpipelineCallback(tmp_path / path))
        with pytest.warns(UserWarning, match=rf"`timeline='.*a.html'` was not written: .*({reason})"):
            fit(run, Base())
        assert run.global_step == 4


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"`timeline='a.png'` must end in `.html`.*`.json`"):
        SuperpipelineCallback("a.png")
    with pytest.raises(ValueError, match=r"`timeline_steps=0` must be at least 1"):
        SuperpipelineCallback(timeline_steps=0)
