"""An error of device memory in words: what a step took, and the one option that helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sp_lightning.pipeline import Pipeline, is_out_of_memory, readable_bytes

# the budget to try next, as a share of one that did not suffice: fragmentation took the rest
_SMALLER_BUDGET = 0.85


@contextmanager
def out_of_memory_explained(pipeline: Pipeline, trains: bool) -> Iterator[None]:
    """Have an error of device memory say what a step, or its backward, took; scopes may be nested.

    The message begins with the original one, by which Lightning's `BatchSizeFinder` knows such errors. Of a step that
    trains, activations are a part.
    """
    try:
        yield
    except RuntimeError as error:
        was_explained = error.__cause__ is not None  # by a scope inside
        if was_explained or not is_out_of_memory(error):
            raise
        explanation = f"{_taken(pipeline, trains)} {_remedy(pipeline, trains)}"
        raise torch.OutOfMemoryError(f"{error}\n{explanation}") from error


def _taken(pipeline: Pipeline, trains: bool) -> str:
    summary, memory = pipeline.summary(), pipeline.backend.memory()
    window = f"`k={summary.k}` of {summary.units} units"
    parts = [f"{readable_bytes(summary.device_bytes)} for weights ({window})"]
    if summary.living:
        parts.append(f"{len(summary.living)} units that live there with their optimizer state among them")
    if trains:
        activations = readable_bytes(pipeline.stats.activation_peak_bytes)
        parts += [
            f"{readable_bytes(summary.gradient_bytes)} for gradients on their way to the host",
            f"up to {activations} for activations (`activations={pipeline.options.activations!r}`)",
        ]
    parts.append("and what operations take in between")
    words = f"superpipeline: this step had {', '.join(parts)}."
    if memory is not None:
        words += f" The peak of allocated memory was {readable_bytes(memory.peak_so_far)}."
    return words


def _remedy(pipeline: Pipeline, trains: bool) -> str:
    """Return the one option that is most likely to help."""
    options, summary, budget = pipeline.options, pipeline.summary(), pipeline.budget
    if trains and options.activations in ("keep", "offload"):
        return "Set `activations='recompute'`."
    if options.k != "auto" and summary.k > 1:
        return "Set `k=1`."
    if summary.plan is not None and budget is not None:
        smaller = f"Set `memory_budget={int(_SMALLER_BUDGET * budget)}`, so that less is planned"
        return f"{smaller}, and fewer units live there." if summary.living else f"{smaller}."
    mostly_activations = trains and summary.device_bytes < pipeline.stats.activation_peak_bytes
    if summary.k > 1 and not mostly_activations:
        return "Set `k=1`."
    return "Use smaller batches, or `loss_in_slices` where it is the logits of a large vocabulary that do not fit."
