"""Layers that share weights, and later have their own: the numbers of plain training, and the memory of each phase."""

from __future__ import annotations

import re

import finetune_lm
import pseudo_to_real
import pytest
import torch
from torch.utils._pytree import tree_leaves

SMALL = ["--layers=4", "--hidden=32", "--heads=2", "--length=32", "--batch-size=4", "--accelerator=cpu"]


def test_both_phases_have_the_numbers_of_plain_training(capsys):
    """Weights and optimizer state, bit by bit."""
    trained = {}
    for strategy in ("superpipeline", "auto"):
        phases = ["--steps=12", "--delink=6", f"--strategy={strategy}", f"--save={strategy}.ckpt"]
        assert pseudo_to_real.main([*SMALL, *phases]) == 0
        trained[strategy] = torch.load(f"{strategy}.ckpt")
    output = capsys.readouterr().out
    streamed, plain = ([each["state_dict"], each["optimizer_states"]] for each in trained.values())
    for value, expected in zip(tree_leaves(streamed), tree_leaves(plain), strict=True):
        assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected
    first, second = (trained["auto"]["state_dict"][f"model.model.layers.{n}.mlp.up_proj.weight"] for n in (0, 1))
    assert not torch.equal(first, second)
    begin, end = map(float, re.search(r"first (\S+), last (\S+)", output).groups())
    assert end < 0.9 * begin
    found = re.findall(r"(\d+) parameters; .* and (\S+) MiB of the host", output)
    host = {int(count): float(size) for count, size in found}
    assert host == {count: pytest.approx(16 * count / 2**20, rel=0.05) for count in (33056, 82400)}


def test_the_first_phase_can_be_a_run_of_its_own(capsys):
    pseudo_to_real.main([*SMALL, "--steps=6", "--delink=6", "--save=shared.ckpt"])
    finetune_lm.main([*SMALL, "--steps=2", "--weights=shared.ckpt"])
    (begin, _), (after, _) = re.findall(r"first (\S+), last (\S+)", capsys.readouterr().out)
    assert float(after) < 0.95 * float(begin)
    with pytest.raises(ValueError, match="each layer has its own weights: go on without Delink"):
        pseudo_to_real.Delink().load_state_dict({"shares": False})


def test_a_model_without_layers_that_are_alike_is_refused():
    with pytest.raises(SystemExit, match="error: LlamaForCausalLM has no list of layers that are alike"):
        pseudo_to_real.main(["--layers=1"])
    with pytest.raises(ValueError, match="no list of layers that are alike"):
        pseudo_to_real.layers_of(torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)]))
