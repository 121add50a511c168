"""Trains with TRL's Trainer in two processes, streamed on two devices or with its own DDP on the CPU, and resumes.

    torchrun --nproc-per-node 2 two_trainers.py FOLDER

Run by `test_second_device.py` in processes of its own.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.hf_trainers import build  # has CUDA be the second device
from tests.second_device import IN_USE


def on_cpu(name: str) -> Any:
    """Have a collective take tensors of a device, which gloo's does not. Hugging Face gathers losses there."""
    collective = getattr(dist, name)

    def gather(outputs: Any, own: Tensor, *args: Any, **kwargs: Any) -> None:
        into = outputs if isinstance(outputs, list) else [outputs]
        copies = [output.cpu() for output in into]
        collective(copies if isinstance(outputs, list) else copies[0], own.cpu(), *args, **kwargs)
        for output, copy in zip(into, copies, strict=True):
            output.copy_(copy)

    return patch.object(dist, name, gather)


def train(folder: Path) -> None:
    """Train, save in the middle, and go on from there."""
    options: dict[str, Any] = {"use_cpu": not IN_USE, "gradient_accumulation_steps": 1}
    if IN_USE:
        options["ddp_backend"] = "gloo"
    whole = build("SFT", folder, IN_USE, save_strategy="steps", save_steps=2, **options)
    whole.train()
    resumed = build("SFT", folder, IN_USE, **options)
    loaded_to = []

    def load(file: Any, *args: Any, map_location: Any = None, **kwargs: Any) -> Any:
        loaded_to.append(str(map_location))
        return torch_load(file, *args, map_location=map_location, **kwargs)

    torch_load = torch.load
    with patch.object(torch, "load", load):
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert not [place for place in loaded_to if "cuda" in place], "optimizer state on a device"
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.args.world_size == 2
    if dist.get_rank() == 0:
        torch.save({name: weight.cpu() for name, weight in whole.model.state_dict().items()}, folder / "weights.pt")


if __name__ == "__main__":
    with ExitStack() as scopes:
        for collective in ("all_gather", "all_gather_into_tensor"):
            scopes.enter_context(on_cpu(collective))
        if find_spec("trl.kernels") is not None:  # there is no driver that could load a kernel
            scopes.enter_context(patch("trl.kernels.chunked_logprob._TRITON_AVAILABLE", False))
        train(Path(sys.argv[1]))
