"""The messages of a run: its plan, its streaming, the progress of long work, and device memory that ran out.

Long work shows its progress in a bar in a terminal, and elsewhere in a line for each tenth (pipeline/stats.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from sp_lightning.pipeline import (
    Pipeline,
    Progress,
    Stats,
    Summary,
    WindowPlan,
    Work,
    as_table,
    is_out_of_memory,
    readable_bytes,
)
from sp_lightning.planning.report import readable_seconds
from sp_lightning.timeline import break_down
from sp_lightning.trainer import FabricNamespace, is_fitting

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# the budget to try next, as a share of one that did not suffice: fragmentation took the rest
_SMALLER_BUDGET = 0.85
_SETTLING_BATCHES = 5  # first ones of a run, in which the engine learns, measures and plans


class Narrator:
    """Reports the plan and the result of a run.

    Args:
        say: Shows a line to users.
        k_prime: The option.
        summary: A Trainer of Lightning asks for reports if it has such a callback, or ours.
    """

    def __init__(self, say: Callable[[str], object], k_prime: int, summary: Any = ()) -> None:
        self._say = say
        self._k_prime = k_prime
        self._summary = summary
        self.is_asked = False  # whether our callback asks for reports
        self._said: set[Hashable] = set()
        self._tells_outcome = False
        self._limits = ""  # the sentence that says what limits a step, if one was recorded

    def begin(self, trainer: Trainer, pipeline: Pipeline | None, optimizers: Sequence[str]) -> None:
        """Print the plan, if it is a new one, with how each optimizer steps."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        is_asked = self.is_asked or any(isinstance(callback, self._summary) for callback in callbacks)
        self._tells_outcome = False
        if pipeline is not None and is_asked:
            self.show(pipeline, optimizers, is_fitting(trainer))

    def show(self, pipeline: Pipeline, optimizers: Sequence[str], trains: bool) -> None:
        """Print the plan, if it is a new one, and report what comes of it at the end."""
        rows = pipeline.summary().rows()
        if optimizers:
            rows.append(("activations", pipeline.options.activations))
        plan = as_table([*rows, *(("optimizer", words) for words in dict.fromkeys(optimizers))])
        is_new = self._is_new(plan)
        if is_new:
            self._say(f"superpipeline runs {type(pipeline.module).__name__} as follows:\n{plan}")
        self._tells_outcome = is_new or trains

    def measured(self, plan: WindowPlan) -> None:
        """Report the plan that was made by measuring the first steps."""
        # times are left out, because they differ each time
        if self._is_new(plan.window):
            self._say(f"superpipeline: {planned(plan, self._k_prime)}")

    def watch(self, pipeline: Pipeline) -> Generator[None, None, None]:
        """Record the batch after those in which the engine learns; `next` follows each batch."""
        self._limits = ""
        for _ in range(_SETTLING_BATCHES):
            yield
        with pipeline.record() as recording:
            yield
        recording.steps = recording.steps[-1:]  # an evaluation may precede it
        numbers = break_down(recording)
        self._limits = f" A batch takes {readable_seconds(numbers.seconds)}. {numbers.headline()}"

    def end(self, pipeline: Pipeline | None) -> None:
        """Report the streaming of the run, if the plan was shown."""
        if self._tells_outcome and pipeline is not None:
            self._say(outcome(pipeline.stats, pipeline.summary()) + self._limits)

    def _is_new(self, what: Hashable) -> bool:
        """Tell whether something is about to be said for the first time."""
        is_new = what not in self._said
        self._said.add(what)
        return is_new


def planned(plan: WindowPlan, k_prime: int = 1) -> str:
    """Describe the plan that was chosen after measuring the first steps, and its expected costs.

    A plan counts units of `k_prime` neighbors each, and the user's `k` counts neighbors.
    """
    chosen = [f"k={plan.k * k_prime}"]
    if plan.on_device:
        there = readable_bytes(plan.on_device_bytes)
        chosen.append(f"units that stay on the GPU: {len(plan.on_device)} ({there})")
    if plan.visiting:
        chosen.append(f"streamed units that are updated on the GPU: {len(plan.visiting)}")
    cost = f"{readable_seconds(plan.step_seconds)} and {readable_bytes(plan.device_bytes)} of GPU memory"
    return f"chosen by the first steps: {', '.join(chosen)}. A step should take {cost}."


def outcome(stats: Stats, summary: Summary) -> str:
    """Describe the streaming of a run, and its costs, in a sentence."""
    up, down = readable_bytes(stats.bytes_to_device), readable_bytes(stats.bytes_to_host)
    done = f"{stats.steps} batches, {stats.loads} unit loads ({stats.misses} late)"
    on_host = summary.host_bytes + summary.host_gradient_bytes + summary.optimizer_bytes
    return (
        f"superpipeline: {done}, {up} to {summary.device}, {down} back. Weights needed at most "
        f"{readable_bytes(summary.device_bytes)} on {summary.device}; weights, gradients and optimizer "
        f"state need {readable_bytes(on_host)} of CPU memory, {on_host / max(1, summary.parameters):.1f} "
        "bytes per parameter."
    )


# ----------------------------------------------------------------------------------------------------------- long work


class ToldProgress(Progress):
    """Begins work that shows its progress in a bar of the first process, or among Lightning's messages."""

    def __init__(self, lightning: FabricNamespace) -> None:
        self._lightning = lightning

    @property
    @override
    def draws_bar(self) -> bool:
        is_first: bool = self._lightning.rank_zero_only.rank == 0
        return is_first and super().draws_bar

    @override
    def say(self, line: str) -> None:
        self._lightning.info(line)


class CountedCopies(TorchFunctionMode):
    """A scope in which copies advance work: by them, `load_state_dict` reads a file that is mapped."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.copy_, Tensor.clone):
            self._work.advance(args[0].nbytes)
        return result


class CountedFile:
    """A file for output that advances work as it is written."""

    def __init__(self, file: IO[bytes], work: Work) -> None:
        self._file = file
        self._work = work

    def write(self, data: bytes | memoryview) -> int:
        """Write all of the data."""
        written = self._file.write(data)
        self._work.advance(written)
        return written

    def flush(self) -> None:
        """Put all written data on disk, or a power cut could leave an empty file; the writer calls this at the end."""
        self._file.flush()
        os.fsync(self._file.fileno())


# ----------------------------------------------------------------------------------------------- device memory ran out


@contextmanager
def out_of_memory_explained(pipeline: Pipeline, trains: bool) -> Iterator[None]:
    """Have an error of device memory say how much a step, or its backward, took; scopes may be nested.

    The message begins with the original one, by which Lightning's `BatchSizeFinder` knows such errors. Activations are
    a part of a step that trains.
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
    k_prime = pipeline.options.k_prime
    window = f"`k={summary.k}` of {summary.units} units"
    if k_prime > 1:
        window = f"`k={summary.k * k_prime}`: {summary.k} of {summary.units} units of {k_prime} layers"
    parts = [f"{readable_bytes(summary.device_bytes)} for weights ({window})"]
    if summary.living:
        parts.append(f"among them {len(summary.living)} units that stay there with their optimizer state")
    if trains:
        activations = readable_bytes(pipeline.stats.activation_peak_bytes)
        parts += [
            f"{readable_bytes(summary.gradient_bytes)} for gradients on their way to CPU memory",
            f"up to {activations} for activations (`activations={pipeline.options.activations!r}`)",
        ]
    parts.append("and temporary memory of operations")
    words = f"superpipeline: this step had {', '.join(parts)}."
    if memory is not None:
        words += f" The peak of allocated memory was {readable_bytes(memory.peak_so_far)}."
    return words


def _remedy(pipeline: Pipeline, trains: bool) -> str:
    """Return the one option that is most likely to help."""
    options, summary, budget = pipeline.options, pipeline.summary(), pipeline.budget
    fewest = "Set `k=1`." if options.k_prime == 1 else "Set `k=1, k_prime=1`."
    if trains and options.activations in ("keep", "offload"):
        return "Set `activations='recompute'`."
    if options.k != "auto" and summary.k > 1:
        return fewest
    if summary.plan is not None and budget is not None:
        smaller = f"Set `memory_budget={int(_SMALLER_BUDGET * budget)}`, so that less is planned"
        return f"{smaller}, and fewer units stay there." if summary.living else f"{smaller}."
    mostly_activations = trains and summary.device_bytes < pipeline.stats.activation_peak_bytes
    if summary.k > 1 and not mostly_activations:
        return fewest
    return "Use smaller batches. If the logits of a large vocabulary do not fit, use `loss_in_slices`."
