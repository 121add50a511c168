"""The texts that are shown for every run: the plan as a table, later choices, and the outcome at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sp_lightning.pipeline import (
    Lane,
    Pipeline,
    Stats,
    Summary,
    WindowPlan,
    as_table,
    readable_bytes,
    readable_seconds,
)

_WINDOW = "k, k_prime"
_ACTIVATIONS = {
    "keep": "stay on the device",
    "recompute": "computed again in backward",
    "offload": "wait on the host for backward",
    "recompute_offload": "computed again in backward, from inputs that wait on the host",
    "auto": "for each unit what is cheapest, so that all of it fits",
}

_WORK = {
    Lane.COMPUTE: "computing",
    Lane.TO_DEVICE: "copies to the device",
    Lane.TO_HOST: "copies to the host",
    Lane.HOST: "the host's work on gradients and weights",
}


def plan_rows(pipeline: Pipeline, optimizers: Sequence[str]) -> list[tuple[str, str]]:
    """Return the plan of a pipeline as pairs of a name and a value.

    Args:
        pipeline: The engine, attached.
        optimizers: How each optimizer steps, and why; empty if none does.
    """
    summary, module = pipeline.summary(), pipeline.module
    automatic = "auto" in (pipeline.options.k, pipeline.options.k_prime)
    how = "at first (auto)" if pipeline.survey.budget is not None else "(auto)"  # without a limit nothing is measured
    rows = [(name, f"{value} {how}" if automatic and name == _WINDOW else value) for name, value in summary.rows()]
    up = bytes_to_device(summary, trains=bool(optimizers))
    moves = f"at most {readable_bytes(up)} of weights to the device"
    if optimizers:
        activations = pipeline.options.activations
        keeps_all = activations == "auto" and pipeline.survey.activations is None
        meaning = "stay on the device, as no limit is known" if keeps_all else _ACTIVATIONS[activations]
        rows.append(("activations", f"{activations}: {meaning}"))
        rows += [("optimizer", optimizer) for optimizer in optimizers]
        down = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        moves += f", {readable_bytes(down)} of gradients back"
    return [*rows, ("a step moves", moves)]


def bytes_to_device(summary: Summary, trains: bool) -> int:
    """Return the bytes of weights that one step sends for a chain of units; backward finds the last `k` still there."""
    stays = min(summary.k, summary.units)
    forward = sum(summary.unit_bytes)
    backward = sum(summary.unit_bytes[: summary.units - stays]) if trains else 0
    return forward + backward


def planned(plan: WindowPlan) -> str:
    """Describe the plan that was chosen after measuring the first steps, and what it is expected to take."""
    chosen = [f"k={plan.k}", f"k_prime={plan.k_prime}"]
    if plan.kept:
        chosen.append(f"{len(plan.kept)} units kept on the device")
    if plan.on_device:
        chosen.append(f"{len(plan.on_device)} units with their optimizer state on the device")
    return (
        f"chosen by the first steps: {', '.join(chosen)}. A step should take {readable_seconds(plan.step_seconds)} and "
        f"{readable_bytes(plan.device_bytes)} of the device; most of the time goes to {_WORK[plan.bottleneck]}."
    )


def show_table(rows: Sequence[tuple[str, str]], rich: bool, say: Callable[[str], None]) -> None:
    """Show a table.

    Args:
        rows: Pairs of a name and a value.
        rich: Whether to draw it with rich, as Lightning draws its own tables; else it is lines of text.
        say: Called with the text.
    """
    if not rich:
        say(as_table(rows))
        return
    from rich import get_console
    from rich.table import Table

    table = Table(title="Superpipeline", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    get_console().print(table, markup=False)


def outcome(stats: Stats, summary: Summary) -> str:
    """Describe in a few lines what was streamed, and what that saved.

    Args:
        stats: The pipeline's counters.
        summary: The pipeline's plan.
    """
    living = f"\nLiving on the device: {summary.living_on_device}." if summary.living_on_device else ""
    return (
        f"Superpipeline: {stats.steps} steps, {stats.loads} unit loads, {readable_bytes(stats.bytes_to_device)} to the "
        f"device, {readable_bytes(stats.bytes_to_host)} back; {stats.misses} loads came late.\n"
        f"Weights on {summary.device}, k={summary.k}, k_prime={summary.k_prime}: at most "
        f"{readable_bytes(summary.device_bytes)} of {readable_bytes(summary.model_bytes)}"
        f", {summary.saved:.0%} less.\n"
        f"On the host: weights {readable_bytes(summary.host_bytes)}, gradients "
        f"{readable_bytes(summary.host_gradient_bytes)}, optimizer {readable_bytes(summary.optimizer_bytes)}; "
        f"{summary.host_bytes_per_parameter:.1f} bytes per parameter.{living}"
    )
