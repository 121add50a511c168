"""Precision plugins: those that work give the numbers of the single-device strategy, the others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import plugins
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.trainer import Namespace
from sp_lightning.trainer.precision import HostGradScaler, host_precision

from .lightning_modules import Base, assert_same_training, fit, streamed, trainer

LIGHTNING = Namespace("lightning.pytorch")


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true", "bf16-mixed"])
def test_bit_equal(precision):
    trace = assert_same_training(Base, arguments=lambda: {"precision": precision, "gradient_clip_val": 0.1})
    dtypes = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    assert trace["end / weight / head.weight"].dtype == dtypes.get(precision, torch.float32)


def test_scalers_of_a_users_own_class():
    class Own(torch.amp.GradScaler):
        pass

    class OnHost(HostGradScaler):
        pass

    kept = MixedPrecision("16-mixed", "cpu", OnHost())
    host_precision(kept, LIGHTNING, streamed())
    assert type(kept.scaler) is OnHost
    assert kept.scaler.scale(torch.ones((), device="meta")).device.type == "meta"
    assert kept.scaler._scale.device.type == "cpu"
    with pytest.raises(MisconfigurationException, match=r"scaler=Own\(\.\.\.\).*Derive the scaler from `sp_lightning"):
        host_precision(MixedPrecision("16-mixed", "cpu", Own("cpu")), LIGHTNING, streamed())


def test_the_scale_is_saved_and_restored(tmp_path):
    def fitted(**arguments: Any) -> Any:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 64.0, growth_interval=3))
        ours = trainer(streamed(), plugins=plugin, **arguments)
        torch.manual_seed(1)
        return ours, Base()

    ours, module = fitted()
    fit(ours, module)
    ours.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=False)["MixedPrecision"]
    assert state["scale"] > 64.0
    again, module = fitted(max_epochs=2)
    again.fit(module, torch.utils.data.DataLoader([]), ckpt_path=tmp_path / "a.ckpt")
    assert again.precision_plugin.scaler.state_dict() == state


@pytest.mark.parametrize(
    "name", ["TransformerEnginePrecision", "BitsandbytesPrecision", "DeepSpeedPrecision", "FSDPPrecision"]
)
def test_plugins_that_need_weights_on_the_device_are_refused(name):
    cls = getattr(plugins, name)
    plugin = cls.__new__(cls)  # their packages are not installed
    with pytest.raises(
        MisconfigurationException, match=rf"`{name}` does not work.*Choose one of `precision='32-true'`"
    ):
        SuperpipelineStrategy(precision_plugin=plugin)
    strategy = SuperpipelineStrategy()
    with pytest.raises(MisconfigurationException, match=name):
        strategy.precision_plugin = plugin  # as the Trainer does


def test_plugins_of_a_users_own():
    class Inputs(Precision):
        def convert_input(self, data: Any) -> Any:
            return data

    class Layers(Precision):
        def convert_module(self, module: nn.Module) -> nn.Module:
            return module

    class Half(plugins.HalfPrecision):
        pass

    for plugin in (Inputs(), Half("bf16-true")):
        fit(trainer(streamed(), plugins=plugin), Base())
    with pytest.raises(MisconfigurationException, match="`Layers` does not work"):
        host_precision(Layers(), LIGHTNING, streamed())
