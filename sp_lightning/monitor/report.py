"""What is said of every run: the plan as a table, with what was chosen and why, and in the end what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sp_lightning.pipeline import Pipeline, Stats, Summary, as_table, readable_bytes

_WINDOW = "k, k_prime"
_ACTIVATIONS = {
    "keep": "stay on the device",
    "recompute": "computed again in backward",
    "offload": "wait on the host for backward",
    "auto": "for each unit what is cheapest, so that all of it fits",
}


def plan_rows(pipeline: Pipeline, optimizers: Sequence[str]) -> list[tuple[str, str]]:
    """The plan of a pipeline as names and values.

    Args:
        pipeline: The engine, attached.
        optimizers: How each optimizer steps, and why; empty where none does.
    """
    summary, module = pipeline.summary(), pipeline.module
    automatic = "auto" in (pipeline.options.k, pipeline.options.k_prime)
    rows = [(name, f"{value} (auto)" if automatic and name == _WINDOW else value) for name, value in summary.rows()]
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
    """Bytes of weights that one step sends, for a chain of units: what forward leaves is there for the backward."""
    stays = min(summary.k, summary.units)
    forward = sum(summary.unit_bytes)
    backward = sum(summary.unit_bytes[: summary.units - stays]) if trains else 0
    return forward + backward


def show_table(rows: Sequence[tuple[str, str]], rich: bool, say: Callable[[str], None]) -> None:
    """Show a table.

    Args:
        rows: Names and values.
        rich: Whether to draw it as Lightning draws its own with rich; else it is lines of text.
        say: Where text goes.
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
    """Say in a few lines what was streamed, and what it saved.

    Args:
        stats: What the pipeline counted.
        summary: Its plan.
    """
    living = f"\nOn the device live {summary.living_on_device}." if summary.living_on_device else ""
    return (
        f"Superpipeline: {stats.steps} steps, {stats.loads} unit loads, {readable_bytes(stats.bytes_to_device)} to the"
        f" device, {readable_bytes(stats.bytes_to_host)} back; {stats.misses} loads came late,"
        f" {stats.heals} were repeated.\n"
        f"Weights on {summary.device}, k={summary.k}, k_prime={summary.k_prime}: at most"
        f" {readable_bytes(summary.device_bytes)} of {readable_bytes(summary.model_bytes)}"
        f", {summary.saved:.0%} less.\n"
        f"On the host: weights {readable_bytes(summary.host_bytes)}, gradients"
        f" {readable_bytes(summary.host_gradient_bytes)}, optimizer {readable_bytes(summary.optimizer_bytes)};"
        f" {summary.host_bytes_per_parameter:.1f} bytes per parameter.{living}"
    )
