"""Pretraining in a budget: of steps, with the numbers of plain training, and of time, by a clock that a test moves."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pretrain
import pytest
import torch

SMALL = ["--accelerator=cpu", "--batch-size=4", "--length=32", "--lr=1e-2"]
NUMBERS = r"(?:first|last|aside:) ([\d.]+)"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the script with a small model over a folder of text; return what it printed, and the checkpoint."""
    text = "\n".join(f"{number} bottles of beer on the wall, {number} bottles of beer." for number in range(200))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(pretrain.NewLM.__init__, "__defaults__", (None, "masked", 3, 32, 2, 1e-2))

    def call(*arguments: str, save: str = "lm.ckpt") -> tuple[str, dict]:
        capsys.readouterr()
        assert not pretrain.main([*SMALL, f"--text={tmp_path}", f"--save={save}", *arguments])
        return capsys.readouterr().out, torch.load(save, weights_only=True)

    return call


def same(one: dict, other: dict) -> bool:
    return all(map(torch.equal, one["state_dict"].values(), other["state_dict"].values()))


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_it_learns_with_the_numbers_of_plain_training(call, objective):
    arguments = ["--steps=40", f"--objective={objective}"]
    (output, saved), (plain, plainly_saved) = call(*arguments), call(*arguments, "--strategy=auto")
    first, last, kept = map(float, re.findall(NUMBERS, output))
    assert max(last, kept) < 0.7 * first
    assert f" s, {40 * 4 * 32:,} tokens" in output
    assert re.findall(NUMBERS, plain) == re.findall(NUMBERS, output)
    assert same(saved, plainly_saved)


def test_time_is_the_budget_and_a_run_goes_on(call, monkeypatch):
    clock = itertools.count()  # each look at it, once in a step, is a second later
    monkeypatch.setattr(pretrain, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))

    def used(saved: dict, seconds: int) -> None:
        assert saved["global_step"] == seconds
        assert saved["callbacks"]["Budget"] == {"used": seconds, "tokens": seconds * 4 * 32}
        (group,) = saved["optimizer_states"][0]["param_groups"]
        assert group["lr"] == pytest.approx(1e-2 * 2 / seconds), "of the last second, before it falls to zero"

    output, saved = call(f"--hours={8 / 3600}")
    used(saved, 8)
    assert "Budget: 8.0 of 8.0 s, 1,024 tokens, 128 tokens/s" in output
    hours = f"--hours={20 / 3600}"
    resumed, saved = call(hours, "--resume=lm.ckpt", save="more.ckpt")
    used(saved, 20)
    assert float(re.search(NUMBERS, resumed)[1]) < 0.95 * float(re.search(NUMBERS, output)[1])
    assert same(saved, call(hours, "--resume=lm.ckpt", "--strategy=auto", save="plain.ckpt")[1])
    assert "no step was taken" in call(hours, "--resume=more.ckpt", save="spent.ckpt")[0]
