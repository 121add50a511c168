"""The callback shows a plan, measures, draws and gives advice; it changes nothing, and says when it is of no use."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import warnings
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.tuner import Tuner

from sp_lightning import PipelineOptions, SuperpipelineCallback
from sp_lightning.callback import PREFIX
from sp_lightning.pipeline import Stats, Summary, WindowPlan
from sp_lightning.pipeline.lanes.device_memory import DeviceMemory
from sp_lightning.planning import choose
from sp_lightning.timeline import break_down
from sp_lightning.trainer.narrator import diagnose, outcome, planned

from .lightning_modules import Base, Notes, assert_same_training, fit, loader, plain, streamed, trainer
from .recordings import make_recording

SUMMARY = {
    "device": "cuda:0",
    "k": 2,
    "k_prime": 1,
    "model_bytes": 4 << 30,
    "device_bytes": 1 << 30,
    "gradient_bytes": 0,
    "saved": 0.75,
    "host_bytes": 4 << 30,
    "devices": 1,
    "host_gradient_bytes": 1 << 30,
    "optimizer_bytes": 8 << 30,
    "host_bytes_per_parameter": 13.0,
    "parameters": 1 << 30,
    "lowered": 0,
    "units": 28,
    "living": (),
    "living_bytes": 14 << 30,
    "visiting": (),
    "visiting_bytes": 0,
    "stepped_on_host": ("", "") * 5,
    "unit_names": tuple(map(str, range(28))),
    "pinned": True,
}


def summary(**changes):
    made = object.__new__(Summary)
    vars(made).update(SUMMARY, **changes)
    return made


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
    text = outcome(
        Stats(steps=24, optimizer_steps=6, loads=40, bytes_to_device=8 << 30, bytes_to_host=2 << 20, misses=1),
        summary(),
    )
    assert text == (
        "Superpipeline: 24 batches, 6 optimizer steps, 40 unit loads, 8.0 GiB to the device, 2.0 MiB back; "
        "1 load came late.\n"
        "Weights on cuda:0, k=2, k_prime=1: at most 1.0 GiB of 4.0 GiB, 75% less.\n"
        "On the host: weights 4.0 GiB (4.0), gradients 1.0 GiB (1.0), optimizer 8.0 GiB (8.0); "
        "13.0 bytes per parameter in all."
    )
    assert ": 1 batch, 1 unit load, " in outcome(Stats(steps=1, loads=1), summary()), "nothing was stepped"
    lowered = outcome(Stats(), summary(host_bytes=6 << 30, lowered=8))
    assert "weights 4.0 GiB (4.0), copies of them in autocast's dtype 2.0 GiB (2.0), gradients" in lowered
    three_ways = {"living": SUMMARY["unit_names"][:12], "visiting": SUMMARY["unit_names"][12:18]}
    mixed = outcome(Stats(), summary(**three_ways, visiting_bytes=3 << 30))
    assert "at most 1.0 GiB, with all of the units that live there.\n" in mixed
    assert mixed.endswith(
        "\nOptimizer steps: 12 of 28 units live on the device with their state (14.0 GiB), 6 visit it to be stepped "
        "there, 10 are stepped on the host.\n"
        "3.0 GiB of the optimizer's state are page-locked, as they visit the device."
    )
    assert "\nOptimizer steps: 0 of 28 units, and what is resident, live on" in outcome(Stats(), summary(living=("",)))
    plan = WindowPlan(2, 1, on_device=("0", "1"), on_device_bytes=1 << 30, visiting=("2",))
    assert "2 units living on the device with their state (1.0 GiB), 1 unit visiting it" in planned(plan)


# --------------------------------------------------------------------------------------------- with and without one


def test_without_the_callback_the_trainer_logs_and_checkpoints_are_plain(tmp_path):
    """The Trainer, its loggers and its checkpoints have what plain training gives them."""

    def run(strategy, folder) -> list[object]:
        notes = Notes()
        run = trainer(
            strategy,
            enable_model_summary=True,
            enable_checkpointing=True,
            logger=notes,
            log_every_n_steps=1,
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder, save_last=True)],
        )
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


class BringsItsOwn(Base):
    def configure_callbacks(self):
        return [SuperpipelineCallback(summary=False)]


@pytest.mark.parametrize("entry", ["fit", "predict"])
@pytest.mark.parametrize(
    ("module", "given", "model_summary", "told"),
    [
        (Base, None, True, ["k, k_prime", "unit loads"]),
        (Base, None, False, ["Superpipeline: 4 units, k=2, k_prime=1 (auto); at most"]),
        (Base, False, True, []),
        (Base, True, False, ["k, k_prime", "A step takes", "unit loads"]),
        (BringsItsOwn, None, True, []),
    ],
    ids=["with a model summary", "in brief without", "quiet callback", "callback", "the module's callback"],
)
def test_a_run_prints_its_plan_and_its_outcome(messages, entry, module, given, model_summary, told):
    callbacks = [*[ModelSummary()] * model_summary, *([] if given is None else [SuperpipelineCallback(summary=given)])]
    run = trainer(streamed(), enable_model_summary=model_summary, callbacks=callbacks)
    getattr(run, entry)(module(), loader(2))
    kinds = ["k, k_prime", "unit loads", "A step takes", "Superpipeline: 4 units, k=2, k_prime=1 (auto); at most"]
    assert [kind for text in messages() for kind in kinds if kind in text] == told


def test_a_plan_is_printed_once(messages):
    """By the same Trainer; what came of a run is said as long as the plan is new."""
    told = []
    run = trainer(streamed(), callbacks=[ModelSummary()], enable_model_summary=True)
    for entry in ["predict", "predict", "test", "fit"]:
        before = len(messages())
        getattr(run, entry)(Base(), loader(2))
        said = "\n".join(messages()[before:])
        told.append(("k, k_prime" in said, "unit loads" in said))
    nothing, everything = (False, False), (True, True)  # what optimizers do is new in the first fit
    assert told == [everything, nothing, nothing, everything]
    before, run = len(messages()), trainer(streamed())
    for _ in range(3):
        run.fit(Base(), loader(2))
    (said,) = [text for text in messages()[before:] if text.startswith("Superpipeline")]
    assert said.startswith("Superpipeline: 4 units")


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
    fit(trainer(plain(), logger=plain_notes, **arguments), Base())
    run = trainer(streamed(k=2), logger=notes, callbacks=SuperpipelineCallback(), **arguments)
    fit(run, Base())
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


# ------------------------------------------------------------------------------------------ what was chosen meanwhile


def test_the_chosen_window_is_printed_once(messages):
    """Also without a summary."""
    ours, module = trainer(streamed(k="auto", memory_budget="1GiB")), Base()
    for _ in range(2):
        ours.predict(module, loader())
    (said,) = [text for text in messages() if "chosen by the first steps" in text]
    assert re.match(r"Superpipeline: chosen .*: k=\d, k_prime=\d.*\. A step should take .* device; the busiest", said)


def test_the_reason_for_a_small_window_is_warned_of_once(monkeypatch):
    """It explains a slow run."""

    def with_nothing(workload, machine, budget, **options):
        return choose(workload, machine, 1 if budget == 1 << 30 else budget, **options)

    monkeypatch.setattr("sp_lightning.planning.planner.choose", with_nothing)
    ours, module = trainer(streamed(k="auto", memory_budget="1GiB")), Base()
    with pytest.warns(UserWarning, match="1 B of device memory is too little"):
        fit(ours, module)
    with warnings.catch_warnings(record=True) as later:
        ours.predict(module, loader())
    assert not [warning for warning in later if "is too little" in str(warning.message)]


# ------------------------------------------------------------------------------------------------ timeline, diagnosis


def test_the_timeline_of_a_fit(tmp_path, messages):
    """One picture of the steps asked for, and at the end a diagnosis with its evidence."""
    path = tmp_path / "new" / "timeline.html"
    assert_same_training(
        arguments=lambda: {"callbacks": SuperpipelineCallback(path, timeline_steps=2), "max_epochs": 3}, k=2, k_prime=1
    )
    text = path.read_text(encoding="utf-8")
    assert "2 steps of" in text
    assert "Base, fit, k=2, k_prime=1, cpu" in text
    assert "forward: blocks.0" in text
    said, _ = [text for text in messages() if text.startswith("A step takes")]  # of two streamed runs
    assert "The device computes" in said


@pytest.mark.parametrize("entry", ["validate", "predict"])
def test_the_timeline_of_an_evaluation(tmp_path, entry):
    run = trainer(streamed(), callbacks=SuperpipelineCallback(tmp_path / "a.json"))
    getattr(run, entry)(Base(), loader(6))
    events = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]
    kinds = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"forward", "load", "step"} <= kinds
    assert "backward" not in kinds


def test_a_run_without_steps_says_that_there_is_no_timeline(tmp_path):
    class Skips(Base):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    run = trainer(streamed(), callbacks=SuperpipelineCallback(tmp_path / "a.html"))
    with pytest.warns(UserWarning, match=r"`timeline='.*a.html'` was not written: no step was recorded"):
        fit(run, Skips())


def test_a_timeline_that_cannot_be_written_is_an_error_before_the_run_and_none_in_it(tmp_path, monkeypatch):
    class Closes(Base):
        def on_train_start(self):
            (tmp_path / "file").write_text("in the way")

    run = trainer(streamed(), max_epochs=1, callbacks=SuperpipelineCallback(tmp_path / "file" / "a.html"))
    with pytest.warns(UserWarning, match=r"`timeline='.*a.html'` was not written: .*file"):
        fit(run, Closes())
    assert run.global_step == 6
    (tmp_path / "b.html").mkdir()
    monkeypatch.setattr(os, "access", lambda place, _: place != tmp_path)  # root may write to anything
    for path, reason in (("file/a", "file is no folder"), ("b", "it is a folder"), ("c", "may not be written to")):
        with pytest.raises(ValueError, match=rf"`timeline='.*{path}.html'` cannot be written: .*{reason}"):
            fit(trainer(streamed(), callbacks=SuperpipelineCallback(tmp_path / f"{path}.html")), Base())


@pytest.mark.parametrize("batch", [0, 4, 5])
def test_an_exception_in_a_recorded_step(tmp_path, batch):
    """The user's own comes out, and the same Trainer's callback serves the next run."""

    class Fails(Base):
        fails = True

        def training_step(self, *args):
            if self.fails and args[1] == batch:
                raise RuntimeError("the user's")
            return super().training_step(*args)

    callback, module = SuperpipelineCallback(tmp_path / "a.html"), Fails()
    with pytest.raises(RuntimeError, match="the user's"):
        fit(trainer(streamed(), callbacks=callback), module)
    Fails.fails = False
    fit(trainer(streamed(), callbacks=callback), module)
    assert (tmp_path / "a.html").is_file()


def test_tuners_leave_callbacks_as_they_were(messages):
    class Tunable(Base):
        batch_size = 2
        lr = 1e-3

        def train_dataloader(self):
            return loader(12, self.batch_size)

        def val_dataloader(self):
            return loader(1)

    run = trainer(streamed(), max_epochs=1, enable_model_summary=True, callbacks=ModelSummary())
    module, before = Tunable(), list(run.callbacks)
    Tuner(run).scale_batch_size(module, max_trials=2, steps_per_trial=2)
    assert module.batch_size > 2
    Tuner(run).lr_find(module, num_training=8, min_lr=1e-5)
    assert run.callbacks == before
    assert not [text for text in messages() if "k_prime" in text]
    run.fit(module)
    assert len([text for text in messages() if "k_prime" in text]) == 2


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"`timeline='a.png'` must end in `.html`.*`.svg`.*`.json`"):
        SuperpipelineCallback("a.png")
    with pytest.raises(ValueError, match=r"`timeline_steps=0` must be at least 1"):
        SuperpipelineCallback(timeline_steps=0)


# ------------------------------------------------------------------------------------------------------------- parts


def advice(retries=0.0, reason=None, idle=0.0, compact=None, **changes) -> list[str]:
    """The lines below the headline, for a recording and a pipeline with these properties."""
    recording = make_recording(
        steps=3,
        **{
            name: changes.pop(name)
            for name in [*changes]
            if name in signature(make_recording).parameters.keys() - {"k"}
        },
    )
    begin, end = recording.steps[-1]
    recording.steps[-1] = begin, end + idle
    peak, total = changes.pop("peak", 9 << 30), changes.pop("total", 10 << 30)
    memory = None if total is None else DeviceMemory(total, total, 0, peak, peak, 0)
    summed_up = summary(**changes.pop("summary", {}))
    pipeline = SimpleNamespace(
        stats=Stats(steps=10, recomputed=changes.pop("recomputed", 0)),
        backend=SimpleNamespace(memory=lambda: memory),
        summary=lambda: summed_up,
        options=PipelineOptions(**changes),
    )
    headline, *given = diagnose(break_down(recording), pipeline, retries, reason, compact)
    assert headline.startswith("A step takes ")
    return [text.removeprefix("  - ") for text in given]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"recomputed": 80}, []),
        (
            {"recomputed": 80, "peak": 4 << 30},
            ["Units compute their forward twice, and 6.0 GiB of the device are free"],
        ),
        ({"load": 5e-3}, []),
        ({"load": 5e-3, "total": None}, []),
        ({"load": 5e-3, "peak": 4 << 30, "memory_budget": "4GB"}, []),
        ({"load": 5e-3, "peak": 4 << 30}, ["6.0 GiB of the device are free: a larger batch computes more"]),
        ({"load": 5e-3, "summary": {"pinned": False}}, ["Host memory is not page-locked"]),
        ({"load": 5e-3, "summary": {"pinned": False, "device": "cpu"}}, []),
        ({"gradients": 7e-3, "summary": {"pinned": False}}, ["Host memory is not page-locked"]),
        ({"retries": 0.5}, []),
        ({"retries": 2.0}, ["The device's memory runs short 2 times in a step"]),
        ({"retries": 2.0, "load": 5e-3, "peak": 4 << 30}, ["The device's memory runs short", "6.0 GiB"]),
        ({"step": 7e-3}, ["The optimizer's steps take 46.3 ms of the host's time in a step: a larger batch"]),
        ({"step": 7e-3, "compact": "Half"}, ["The optimizer's steps take", "Half reads and writes half as much"]),
        ({"step": 7e-3, "optimizer_on": "host"}, ["The optimizer's steps take", "`optimizer_on='auto'` has units"]),
        ({"step": 7e-3, "optimizer_on": "host", "summary": {"device": "cpu"}}, ["The optimizer's steps take"]),
        ({"step": 7e-3, "peak": 4 << 30}, ["The optimizer's steps take"]),
        ({"step": 7e-3, "peak": 4 << 30, "k": 2}, ["The optimizer's", "6.0 GiB of the device are free: with `k="]),
        (
            {"step": 7e-3, "peak": 4 << 30, "memory_budget": "4GB"},
            ["The optimizer's steps take", "6.0 GiB of the device are free: with a larger `memory_budget`"],
        ),
        ({"visit": 7e-3}, ["The optimizer's steps take 50.3 ms of the device's time in a step: a larger batch"]),
        ({"visit": 1e-3, "load": 5e-3, "compact": "Half"}, ["35% of these copies are optimizer state that visits"]),
        ({"idle": 1.0}, ["Lightning's `Trainer(profiler='simple')`"]),
        ({"idle": 1.0, "reason": "LBFGS looks at all weights"}, ["The optimizer steps while the device waits: LBFGS"]),
    ],
    ids=str,
)
def test_advice_needs_evidence(monkeypatch, changes, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = advice(**changes)
    assert len(given) == len(expected), given
    assert all(text.startswith(words) for text, words in zip(given, expected, strict=True))
