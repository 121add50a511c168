"""A frozen language model learns to see: what is trained, what goes back to the host, and what it answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import finetune_perceptual
import pytest
import recipe
import torch
from PIL import Image

STEPS = 75


def test_it_learns_to_see_and_only_what_is_trained_goes_back(capsys, caplog, monkeypatch):
    kept = [recipe.Losses(), recipe.Losses()]
    runs = iter(kept)
    monkeypatch.setattr(recipe, "Losses", lambda: next(runs))
    arguments = ["--accelerator=cpu", "--lr=5e-3"]
    assert not finetune_perceptual.main([*arguments, f"--steps={STEPS}", "--save=trained.ckpt"])
    output = capsys.readouterr().out
    trained, share = re.search(r"(\d+) of \d+ parameters are trained, (\S+)% are frozen", output).groups()
    assert float(share) > 99
    assert ", 0 B back" in caplog.text, "in the validation before"
    assert f", {STEPS * int(trained) * 4 / 2**20:.1f} MiB back" in caplog.text, "a gradient for each in each step"
    first, last, before, after = map(float, re.findall(r"(?:first|last|before|after) ([\d.]+)", output))
    assert last < 0.3 * first
    assert before < 5
    assert after > 20
    assert not finetune_perceptual.main([*arguments, "--steps=15", "--strategy=auto"])
    assert kept[0].values[:15] == kept[1].values
    saved = torch.load("trained.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {"token", "projection.weight", "projection.bias"}
    assert sum(weight.numel() for weight in saved.values()) == int(trained)


def test_images_are_looked_for_before_any_work(capsys):
    Image.new("RGB", (8, 8)).save("a.png")
    for lines, message in [
        ([{"image": "a.png", "text": "a"}, {"image": "b.png", "text": "b"}], "my.jsonl, line 2: no image b.png"),
        ([{"image": "a.png"}], 'my.jsonl, line 1: not {"image": FILE, "text": ANSWER}'),
        ([{"image": "a.png", "text": "a"}], "my.jsonl: 1 examples, where one is for validation"),
    ]:
        Path("my.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        with pytest.raises(SystemExit):
            finetune_perceptual.parse(["--examples=my.jsonl"])
        assert message in capsys.readouterr().err.splitlines()[-1]
