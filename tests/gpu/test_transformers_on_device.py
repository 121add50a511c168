"""Trainers of transformers and TRL: models stay in CPU memory, and train closely as plain ones do on the device."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import Tensor

from tests.helpers import assert_close_trace
from tests.hf_trainers import CASES, build, everything
from tests.second_device import IN_USE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("trl") is None, reason="the Trainers need it: pip install -e '.[trl]'"),
]


@pytest.mark.parametrize("case", ["the best model", "sequences", "autocast", "SFT", "DPO"])
def test_a_trainer(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a generation, evaluations, and with a reference that streams as well."""
    if IN_USE and find_spec("trl.kernels") is not None:  # there is no driver that could load a kernel
        monkeypatch.setattr("trl.kernels.chunked_logprob._TRITON_AVAILABLE", False)
    seen = []
    for streams in (False, True):
        trainer = build(case, tmp_path / str(streams), streams, use_cpu=False)
        assert {weight.device.type == "cpu" for weight in trainer.model.parameters()} == {streams}
        trainer.train()
        if "eval_strategy" in CASES[case][1]:
            trainer.evaluate()
        assert {weight.device.type == "cpu" for weight in trainer.model.parameters()} == {streams}
        seen.append({name: value for name, value in everything(trainer, tmp_path).items() if "file" not in name})
        del trainer
        gc.collect()
    logs = [{name: value for name, value in each.items() if not isinstance(value, Tensor)} for each in seen]
    assert logs[1] == pytest.approx(logs[0], rel=1e-3, abs=1e-4, nan_ok=True)
    assert_close_trace(*seen)
