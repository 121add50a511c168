"""Steps that run out of device memory: the error says what the step took, and which one option helps next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sp_lightning.pipeline import Pipeline, is_out_of_memory, readable_bytes

_SMALLER_BUDGET = 0.85  # the budget to try next, as a share of one that did not suffice: fragmentation took the rest


@contextmanager
def out_of_memory_explained(pipeline: Pipeline, trains: bool) -> Iterator[None]:
    """Open a scope for a step or its backward; scopes may be nested.

    Args:
        pipeline: The engine.
        trains: Whether the step builds a graph, so that activations are part of what it takes.

    Raises:
        torch.OutOfMemoryError: If what runs in the scope runs out of device memory. The message begins with the
            original one, by which Lightning's `BatchSizeFinder` knows such errors.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error) or error.__cause__ is not None:  # the latter if a scope inside has explained it
            raise
        raise torch.OutOfMemoryError(f"{error}\n{_taken(pipeline, trains)} {_remedy(pipeline, trains)}") from error


def _taken(pipeline: Pipeline, trains: bool) -> str:
    summary, peak = pipeline.summary(), pipeline.backend.peak_memory()
    parts = [f"{readable_bytes(summary.device_bytes)} for weights (`k={summary.k}` of {summary.units} units)"]
    if trains:
        activations = readable_bytes(pipeline.stats.activation_peak_bytes)
        parts += [
            f"{readable_bytes(summary.gradient_bytes)} for gradients on their way to the host",
            f"up to {activations} for activations (`activations={pipeline.options.activations!r}`)",
        ]
    used = "" if peak is None else f" The peak of allocated memory was {readable_bytes(peak)}."
    return f"superpipeline: this step had {', '.join(parts)}, and what operations take in between.{used}"


def _remedy(pipeline: Pipeline, trains: bool) -> str:
    """Return the one option that is most likely to help."""
    options, summary, budget = pipeline.options, pipeline.summary(), pipeline.budget
    if trains and options.activations in ("keep", "offload", "recompute"):
        less = "recompute" if options.activations == "keep" else "recompute_offload"
        return f"Set `activations={less!r}`."
    if options.k != "auto" and summary.k > 1:
        return "Set `k=1`."
    if summary.plan is not None and budget is not None:
        return f"Set `memory_budget={int(_SMALLER_BUDGET * budget)}`, so that less is planned."
    if summary.k > 1 and not (trains and summary.device_bytes < pipeline.stats.activation_peak_bytes):
        return "Set `k=1`."
    return (
        "Use smaller batches, or `chunked_cross_entropy` where it is the logits of a large vocabulary that do not fit."
    )
