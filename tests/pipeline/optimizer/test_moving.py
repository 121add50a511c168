"""What a module has besides its parameters moves as in `module.to(device)`; the parameters stay where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sp_lightning.pipeline.optimizer.staying import move_all_but_parameters

META = torch.device("meta")


def test_what_the_root_moves_in_a_to_of_its_own() -> None:
    """A teacher that is no submodule, say, so that its weights are not trained, nor saved."""

    class Distilled(nn.Sequential):
        teacher = (nn.Linear(4, 4),)

        def to(self, *args: Any, **kwargs: Any) -> Distilled:
            self.teacher[0].to(*args, **kwargs)
            return super().to(*args, **kwargs)

    root = Distilled(nn.Linear(4, 4), nn.BatchNorm1d(4))
    move_all_but_parameters(root, META)
    assert root.teacher[0].weight.is_meta
    assert {buffer.device.type for buffer in root.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in root.parameters()} == {"cpu"}
    assert "_apply" not in vars(root)
