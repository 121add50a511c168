"""The numbers of a run, written down as digests while it trains, so that a large model needs no memory for them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from sp_lightning.pipeline import Stats, Summary
from sp_lightning.pipeline.torch_private import parts_of

_ALIGNED = 1024


class Look(Enum):
    """How closely a run is looked at. A look while it trains can change when the optimizer updates weights."""

    RESULTS = "losses, and the last weights"  # as users run it
    WEIGHTS = "losses, and weights after each step"
    GRADIENTS = "losses, gradients, and weights after each step"


@dataclass(frozen=True)
class Counts:
    """Counts of the engine's work in a run."""

    stats: Stats
    summary: Summary

    def __str__(self) -> str:
        counts = {
            "updates in backward": self.stats.steps_in_backward,
            "updates on the GPU": self.stats.visits,
            "units stay on the GPU": len(self.summary.living),
        }
        parts = [f"{count} {words}" for words, count in counts.items() if count]
        return ", ".join([f"{self.stats.loads} copies of {self.summary.units} units", *parts])


class Label(NamedTuple):
    """A number that a run shows, and the moment at which a hook notes it: no two hooks share a label."""

    what: str
    when: str = ""
    # in a second run of plain training; a metric may be a time or a throughput
    must_repeat: bool = True

    def __str__(self) -> str:
        return f"{self.what} {self.when}".strip()


@dataclass
class Trace:
    """The record of a run: a digest for each label, in the order in which it was seen."""

    digests: dict[Label, str] = field(default_factory=dict)
    values: dict[Label, Tensor | None] = field(default_factory=dict)  # those that were asked for
    steps: int = 0
    weight_bytes: int = 0  # of all weights, with the gaps that may be between them
    counts: Counts | None = None  # counts of the engine's work; None in plain training

    def differences(self, other: Trace) -> list[Label]:
        """Return the labels of another run's numbers that are not those of this one, in the order of that run."""
        return [label for label, found in other.digests.items() if self.digests.get(label) != found]


class Observer:
    """The hooks of a callback that write down the numbers of a run.

    They belong to this package, so that the strategy does not take them for a user's hooks that read gradients.

    Args:
        look: How closely to look.
        keep: The labels whose values are kept in addition to their digests.
        left_out: The numbers that are not noted, at any moment.
    """

    def __init__(self, look: Look, keep: Collection[Label], left_out: Collection[str]) -> None:
        self.trace = Trace()
        self._look = look
        self._keep = keep
        self._left_out = left_out
        self._batches = 0
        self._updates = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        """Note the batch, to tell different data from different numbers."""
        self._batches += 1
        self._note_all("the batch", f"{self._batches}", batch)

    def on_before_optimizer_step(self, trainer: Any, module: nn.Module, optimizer: Optimizer) -> None:
        """Note the gradients of the weights that this optimizer is about to update."""
        self._updates += 1
        if self._look is not Look.GRADIENTS:
            return
        updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for name, weight in module.named_parameters():
            if id(weight) in updated:
                self._note(Label(f"the gradient of {name}", f"in step {self._updates}"), weight.grad)

    def on_train_batch_end(self, trainer: Any, module: nn.Module, outputs: Any, *_: Any) -> None:
        """Note the loss, other outputs, and the weights if the optimizer has updated them.

        The module's own hook runs later, and may change weights once more.
        """
        for name, output in (outputs or {}).items():
            is_loss = name == "loss"
            what = "the loss" if is_loss else f"the output {name}"
            self._note_all(what, f"of batch {self._batches}", output, must_repeat=is_loss)
        if self.trace.steps < trainer.global_step:
            self.trace.steps = trainer.global_step
            if self._look is not Look.RESULTS:
                self._note_weights(module, f"after step {self.trace.steps}")

    def on_train_end(self, trainer: Any, module: nn.Module) -> None:
        """Note the last weights, and the counts of the engine's work."""
        self._note_weights(module, "at the end")
        for name, value in trainer.callback_metrics.items():
            self._note_all(f"the metric {name}", "", value, must_repeat=False)
        self.trace.digests[Label("the number of steps")] = str(self.trace.steps)
        self.trace.weight_bytes = sum(weight.nbytes + _ALIGNED for weight in module.parameters())
        pipeline = getattr(trainer.strategy, "pipeline", None)
        if pipeline is not None:
            self.trace.counts = Counts(replace(pipeline.stats), pipeline.summary())

    def _note_weights(self, module: nn.Module, when: str) -> None:
        for name, weight in module.named_parameters():
            self._note(Label(f"the weight {name}", when), weight)
        for name, buffer in module.named_buffers():
            self._note(Label(f"the buffer {name}", when, must_repeat=False), buffer)

    def _note_all(self, what: str, when: str, values: Any, must_repeat: bool = True) -> None:
        """Note all tensors of a structure."""
        tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
        for number, tensor in enumerate(tensors):
            which = f"{when}, tensor {number + 1}" if number else when
            self._note(Label(what, which, must_repeat), tensor)

    def _note(self, label: Label, value: Tensor | None) -> None:
        if label.what in self._left_out:
            return
        self.trace.digests[label] = "none" if value is None else digest(value)
        if label in self._keep:
            self.trace.values[label] = None if value is None else value.detach().to("cpu", copy=True)


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Return a text that is the same for tensors with the same numbers; -0 is 0, and NaN is NaN."""
    noted = hashlib.blake2b(digest_size=16)
    for part in parts_of(tensor.detach()):
        on_host = part.to("cpu").contiguous()
        noted.update(f"{on_host.dtype} {tuple(on_host.shape)}".encode())
        if on_host.is_floating_point():
            on_host = (on_host + 0.0).masked_fill_(on_host.isnan(), torch.nan)
        noted.update(on_host.reshape(-1).view(torch.uint8).numpy().data)
    return noted.hexdigest()
