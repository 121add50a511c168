"""What a run says of itself: its plan, as a table or in brief, what is chosen later, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.pipeline import Pipeline, Stats, Summary, WindowPlan, as_table, readable_bytes, readable_seconds
from sp_lightning.timeline import LANES


def plan_table(pipeline: Pipeline, optimizers: Sequence[str]) -> str:
    """Describe the plan of a pipeline line by line.

    Args:
        pipeline: The engine, attached.
        optimizers: How each optimizer steps, and why; empty if none does.
    """
    rows = [(name, value + _auto(pipeline) * (name == "k, k_prime")) for name, value in pipeline.summary().rows()]
    if optimizers:
        rows.append(("activations", pipeline.options.activations))
    return as_table([*rows, *(("optimizer", optimizer) for optimizer in optimizers)])


def plan_in_brief(pipeline: Pipeline, optimizers: Sequence[str]) -> str:
    """Describe the plan of a pipeline in two lines; the arguments are those of `plan_table`."""
    plan = pipeline.summary()
    weights = f"{readable_bytes(plan.device_bytes)} of {readable_bytes(plan.model_bytes)} of weights on {plan.device}"
    window = f"k={plan.k}, k_prime={plan.k_prime}{_auto(pipeline)}"
    return "\n".join([f"Superpipeline: {_many(plan.units, 'unit')}, {window}; at most {weights}.", *optimizers])


def _auto(pipeline: Pipeline) -> str:
    return " (auto)" if "auto" in (pipeline.options.k, pipeline.options.k_prime) else ""


def planned(plan: WindowPlan) -> str:
    """Describe the plan that was chosen after measuring the first steps, and what it is expected to take."""
    chosen = [f"k={plan.k}", f"k_prime={plan.k_prime}"]
    if plan.kept:
        chosen.append(f"{_many(len(plan.kept), 'unit')} kept on the device")
    if plan.on_device:
        chosen.append(f"{_many(len(plan.on_device), 'unit')} with optimizer state on the device")
    return (
        f"chosen by the first steps: {', '.join(chosen)}. A step should take {readable_seconds(plan.step_seconds)} and "
        f"{readable_bytes(plan.device_bytes)} of the device; the busiest lane is {LANES[plan.bottleneck]}."
    )


def outcome(stats: Stats, summary: Summary) -> str:
    """Describe in a few lines what was streamed, and what that saved.

    Args:
        stats: The pipeline's counters.
        summary: The pipeline's plan.
    """
    stepped = f", {_many(stats.optimizer_steps, 'optimizer step')}" if stats.optimizer_steps else ""
    moved = f"{readable_bytes(stats.bytes_to_device)} to the device, {readable_bytes(stats.bytes_to_host)} back"
    late = f"{_many(stats.misses, 'load')} came late"
    weights = f"at most {readable_bytes(summary.device_bytes)} of {readable_bytes(summary.model_bytes)}"
    # What masters take beyond the model's own bytes is what is sent in their place.
    copies = max(0, summary.host_bytes - summary.model_bytes) if summary.lowered else 0
    parts = {
        "weights": summary.host_bytes - copies,
        "copies of them in autocast's dtype": copies,
        "gradients": summary.host_gradient_bytes,
        "optimizer": summary.optimizer_bytes,
    }
    words = [f"{name} {readable_bytes(size)} ({size / summary.parameters:.1f})" for name, size in parts.items() if size]
    living = f"\nLiving on the device: {summary.living_on_device}." if summary.living_on_device else ""
    return (
        f"Superpipeline: {_many(stats.steps, 'batch')}{stepped}, {_many(stats.loads, 'unit load')}, {moved}; {late}.\n"
        f"Weights on {summary.device}, k={summary.k}, k_prime={summary.k_prime}: {weights}, {summary.saved:.0%} less.\n"
        f"On the host: {', '.join(words)}; {summary.host_bytes_per_parameter:.1f} bytes per parameter in all.{living}"
    )


def _many(count: int, noun: str) -> str:
    ending = "" if count == 1 else "es" if noun.endswith("h") else "s"
    return f"{count} {noun}{ending}"
