"""What Fabric calls in place of a model, and how the model is given back when Fabric's own wrapper goes."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from sp_lightning.pipeline import Pipeline
from sp_lightning.trainer.narrator import out_of_memory_explained
from sp_lightning.trainer.processes import Meetings


class AttachedModel(nn.Module):
    """What Fabric calls in place of a model, as it would call DDP's wrapper; it has the model's weights and children.

    Nothing else holds it than what `fabric.setup` returns; when that goes, the model is a plain one on the CPU again.
    """

    def __init__(self, pipeline: Pipeline, meetings: Meetings) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.meetings = meetings
        # not as a child: names of weights stay as they are
        for contents in ("_parameters", "_buffers", "_modules"):
            vars(self)[contents] = vars(pipeline.module)[contents]
        weakref.finalize(self, _give_back, pipeline, threading.get_ident()).atexit = False

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.meetings.share_buffers(self.pipeline)
        trains = torch.is_grad_enabled()
        if trains:
            self.meetings.meet(self.pipeline)
        with out_of_memory_explained(self.pipeline, trains):
            return self.pipeline.module(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """Tell Fabric whether methods of the model may be called past this: where no process waits for another."""
        return self is other or (self.meetings.processes is None and self.pipeline.module is other)

    __hash__ = nn.Module.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the model, which is a plain one then."""
        return _itself, (self.pipeline.module,)


def _itself(model: nn.Module) -> nn.Module:
    return model


_given_up: list[Pipeline] = []  # of models that were dropped


def _give_back(pipeline: Pipeline, thread: int) -> None:
    """Give a model back; later, if Python's collector runs in a thread of the engine, which that would wait for."""
    _given_up.append(pipeline)
    if threading.get_ident() == thread:
        give_all_back()


def give_all_back() -> None:
    """Give all models back that were dropped."""
    while _given_up:
        _given_up.pop().detach()
