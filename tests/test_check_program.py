"""`sp-lightning check --model ...`: right programs pass in all ways, and the first number that is wrong is named."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch.callbacks
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sp_lightning import cli
from sp_lightning.check_program import program
from sp_lightning.check_program.compare import describe_difference, relative_difference
from sp_lightning.check_program.observer import digest
from sp_lightning.check_program.ways import Way, all_ways

WIDTH = 4
HERE = "tests.test_check_program"


class Net(L.LightningModule):
    """Blocks with random numbers, and an alias of a weight, which a run leaves behind (docs/limits.md).

    Args:
        late: How weights change after callbacks have seen the end of a batch.
        times: Where a time is: in a "metric", an output of the step and a buffer, or in the "loss".
    """

    def __init__(
        self,
        reads_alias: bool = False,
        writes_alias: bool = False,
        steps: bool = True,
        late: str = "",
        times: str = "",
        optimizer: str = "AdamW",
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.automatic_optimization = steps
        self.late, self.times = late, times
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(4)])
        self.reads_alias, self.writes_alias = reads_alias, writes_alias
        self.alias = [self.blocks[2][0].weight.detach()]
        self.average = copy.deepcopy(self.blocks).requires_grad_(False) if late == "average" else None
        self.register_buffer("clock", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.blocks(batch[0]).square().mean()
        if self.reads_alias:
            loss = loss + self.alias[0].sum()
        seconds = time.perf_counter()
        if self.times == "metric":
            self.clock.fill_(seconds)
            self.log_dict({"seconds": seconds, "logged": loss})
        return {"loss": loss * seconds if self.times == "loss" else loss, "time": self.clock.clone()}

    def on_train_batch_end(self, *args: Any) -> None:
        for weight, average in zip(self.blocks.parameters(), (self.average or self.blocks).parameters(), strict=True):
            if self.late:
                average.data.lerp_(weight, 0.1).clamp_(-0.1, 0.1)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.writes_alias:
            self.alias[0].mul_(0.9)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.optimizer)
        return kind(self.parameters(), lr=1e-2, **({"fused": True} if kind is torch.optim.AdamW else {}))


class Data(L.LightningDataModule):
    """Random rows, in the order of a seed or of none."""

    def __init__(self, has_seed: bool = True) -> None:
        super().__init__()
        self.has_seed = has_seed

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        if not self.has_seed:
            generator.seed()
        return DataLoader(TensorDataset(torch.randn(48, WIDTH, generator=generator)), 4, shuffle=True)


Check = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run the command; its status, and the lines that it printed."""

    def run(*arguments: str, ways: slice = slice(None)) -> tuple[int, list[str]]:
        def some(*args: Any, **named: Any) -> list[Way]:
            return list(all_ways(*args, **named))[ways]

        monkeypatch.setattr(program, "all_ways", some)
        monkeypatch.setattr(sys, "argv", ["sp-lightning", "check", *arguments])
        status = cli.main()
        printed = capsys.readouterr()
        return status, [*printed.out.splitlines(), *printed.err.splitlines()]

    return run


def test_a_right_program(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As configured in YAML, with options of the strategy; in each way what it is for happened, and no file is left."""
    strategy = {"class_path": "sp_lightning.SuperpipelineStrategy", "init_args": {"k_prime": 2}}
    trainer = {"strategy": strategy, "accumulate_grad_batches": 2, "max_epochs": 3}
    configuration = {"trainer": trainer, "model": f"{HERE}.Net", "data": f"{HERE}.Data"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration))
    monkeypatch.chdir(tmp_path)
    status, lines = check("--config", "run.yaml", "--steps", "3")
    assert status == 0
    assert lines[0] == "Net, plain training, twice: the same numbers in 3 steps"
    ways = [line for line in lines if line.startswith("  ")]
    assert len(ways) == 18
    assert all("same bits" in line and "2 units" in line for line in ways)
    assert sum("updates in backward" in line for line in ways) == 14
    assert sum("updates on the GPU" in line for line in ways) == 4
    assert sum("1 units stay on the GPU" in line for line in ways) == 4
    assert "Not compared: gradients after the run" in "".join(lines[-3:])
    assert lines[-1].endswith("the CPU, Net: right in 18 ways")
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("arguments", "ways", "says"),
    [
        (["--model.optimizer=SGD"], slice(7, 11), "right in 1 ways; 3 do not apply here, because without a GPU, only"),
        (
            ["--trainer.gradient_clip_val=1"],
            slice(4, 6),
            "because no unit was updated in backward, because gradients are",
        ),
    ],
)
def test_ways_that_do_nothing_do_not_count(arguments: list[str], ways: slice, says: str, check: Check) -> None:
    """They are right for nothing, so the last line says how many, and why."""
    status, lines = check(f"--model={HERE}.Net", *arguments, f"--data={HERE}.Data", "--steps=2", ways=ways)
    assert status == 0, lines
    assert says in lines[-1]
    assert "same bits; not exercised: " in "".join(lines)


@pytest.mark.parametrize("ways", [slice(3, 5), slice(None)], ids=["two ways", "all ways"])
@pytest.mark.parametrize("change", ["--model.late=average", "--model.late=clamp", "EMAWeightAveraging"])
def test_weights_that_change_late(change: str, ways: slice, check: Check) -> None:
    """By hooks that run after the end of a batch was noted: the last weights are not those of the last step."""
    if change == "EMAWeightAveraging":
        if not hasattr(lightning.pytorch.callbacks, change):  # as in Lightning 2.5
            pytest.skip("needs Lightning 2.6")
        change = f"--trainer.callbacks=lightning.pytorch.callbacks.{change}"
    status, lines = check(f"--model={HERE}.Net", change, f"--data={HERE}.Data", "--steps=3", ways=ways)
    assert status == 0, lines


def test_metrics_that_plain_training_does_not_repeat(check: Check) -> None:
    """Times are no reason to refuse a program: they are named, and everything else is compared."""
    times = ["--model.times=metric", "--steps=2"]
    status, lines = check(f"--model={HERE}.Net", *times, f"--data={HERE}.Data", ways=slice(3, 5))
    assert status == 0, lines
    left_out = "the output time, the buffer clock, the metric seconds"
    assert lines[1] == f"Not compared (different in the two plain runs): {left_out}"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("reads_alias", "the loss of batch 2 differs by up to "),
        ("writes_alias", "the weight blocks.2.0.weight after step 1 differs by up to "),
    ],
)
@pytest.mark.parametrize("first", [0, 4], ids=["gradients are read", "gradients are hidden"])
def test_a_wrong_program(wrong: str, named: str, first: int, check: Check) -> None:
    """What depends on where a weight lies is named, with the step and by how much."""
    ways = slice(first, first + 2)
    status, lines = check(f"--model={HERE}.Net", f"--model.{wrong}=true", f"--data={HERE}.Data", ways=ways)
    assert status == 1
    assert named in lines[1]
    assert "wrong in 2 of 2 ways; updated on the CPU" in lines[-1]
    assert named in lines[-1]


@pytest.mark.parametrize(
    ("cause", "named"),
    [("--data.has_seed=false", "the batch 1"), ("--model.times=loss", "the gradient of blocks.0.0.weight in step 1")],
)
def test_a_program_that_does_not_repeat_itself(cause: str, named: str, check: Check) -> None:
    """It cannot be compared with anything, and what changes first is named."""
    status, lines = check(f"--model={HERE}.Net", f"--data={HERE}.Data", cause)
    assert status == 1
    assert f"plain training does not repeat itself: {named} differs between two runs" in lines[-1]


def test_a_way_that_fails(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in one way is wrong, and the others are checked."""
    train = program.ConfiguredProgram.train

    def fail(self: Any, observer: Any, way: Way | None, reads_gradients: bool) -> None:
        if way is not None and way.options.activations == "recompute":
            raise RuntimeError("no second forward")
        train(self, observer, way, reads_gradients)

    monkeypatch.setattr(program.ConfiguredProgram, "train", fail)
    status, lines = check(f"--model={HERE}.Net", f"--data={HERE}.Data", ways=slice(3))
    assert status == 1
    assert "FAILED: it raised RuntimeError: no second forward" in lines[2]
    assert "same bits" in lines[3]
    assert "wrong in 1 of 3 ways; updated on the CPU, after backward, activations='recompute'" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config=nowhere.yaml"], "nowhere.yaml"),
        ([f"--model={HERE}.Net", f"--data={HERE}.Data", "--model.steps=false"], "Net took no optimizer step"),
        ([f"--model={HERE}.Net", "--steps=0"], "`--steps 0` must be at least 1"),
        (["foo", f"--model={HERE}.Net"], "`device='foo'`"),
        ([f"--model={HERE}.Net"], "Net has no training data. Add `--data CLASS`, a LightningDataModule, or define"),
        ([f"--data={HERE}.Data"], "the following arguments are required: --model"),
        ([f"--model={HERE}.Nett"], f"`--model`: Problem with given class_path '{HERE}.Nett': module "),
        (["--model=nowhere.Net"], "`--model`: Problem with given class_path 'nowhere.Net': No module named 'nowhere'"),
        ([f"--model={HERE}.Net", f"--data={HERE}.Net"], f"`--data`: Import path {HERE}.Net does not correspond to"),
        ([f"--model={HERE}.Net", "--model.late=1", "--model.nope=1"], "Net': Option 'nope' is not accepted"),
        (["--model=lightning.LightningModule", f"--data={HERE}.Data"], "LightningModule cannot be trained: No `trai"),
    ],
)
def test_what_cannot_be_checked(arguments: list[str], says: str, check: Check) -> None:
    """In one line, without a traceback."""
    status, lines = check(*arguments)
    assert status == 2
    assert len(lines) == 1
    assert says in lines[0]


def test_a_module_that_fails_when_it_is_imported(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text('{}["DATA"]')
    monkeypatch.syspath_prepend(tmp_path)
    error = "sp-lightning: error: `--model` cannot be imported: KeyError: 'DATA'"
    assert check("--model=broken.Net") == (2, [error])


def test_digests() -> None:
    """Of a zero and a NaN there is one; dtypes, shapes and each bit count."""
    one = torch.tensor([0.0, torch.nan, 1.0])
    assert digest(one) == digest(torch.tensor([-0.0, -torch.nan, 1.0]))
    others = [one.double(), one[None], torch.tensor([0.0, torch.nan, 1.0000001]), one.to_sparse()]
    assert len({digest(tensor) for tensor in [one, *others]}) == 5


@pytest.mark.parametrize(
    ("plain", "streamed", "relative", "says"),
    [
        ([1.0, -4.0], [1.5, -4.0], 0.125, "differs by up to 5.0e-01 (largest value 4.0e+00)"),
        ([math.nan, 1.0, math.inf], [math.nan, 1.0, math.inf], 0.0, "differs, but not every time"),
        ([1.0], [math.nan], math.inf, "differs by up to inf (largest value 1.0e+00)"),
        ([1.0], [1.0, 2.0], math.inf, "differs: its shape is (2,), not (1,)"),
        ([1.0], None, math.inf, "differs: streamed training has none"),
    ],
)
def test_differences(plain: list[float], streamed: list[float] | None, relative: float, says: str) -> None:
    one, other = torch.tensor(plain), None if streamed is None else torch.tensor(streamed)
    assert relative_difference(one, other) == relative
    assert describe_difference(one, other) == says
