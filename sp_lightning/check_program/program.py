"""Train a program of the user's plainly and in every way, and say which number differs first."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from functools import partial
from itertools import dropwhile

import torch

from sp_lightning.check import versions_and_machine
from sp_lightning.check_program.compare import describe_difference, relative_difference
from sp_lightning.check_program.configured import ConfiguredProgram
from sp_lightning.check_program.observer import Label, Look, Observer, Trace
from sp_lightning.check_program.ways import Way, all_ways
from sp_lightning.lightning_cli import in_the_namespace_of_the_model
from sp_lightning.pipeline import is_out_of_memory

_ROUNDING = 1e-2
"""On a GPU, numbers may be this far apart after an update, as a part of the largest of a weight."""

_ALWAYS_EQUAL = ("the batch", "the number of steps")

say = partial(print, flush=True)


def check_program(arguments: Sequence[str], device: torch.device, steps: int) -> bool:
    """Print a line for each way, and one to paste into an issue; tell whether all have the numbers of plain training.

    Args:
        arguments: The arguments that describe the program, as for `sp-lightning fit`.
        device: The device to compute on.
        steps: Number of optimizer steps.

    Raises:
        argparse.ArgumentError: If the arguments describe no program that can be checked.
    """
    if steps < 1:
        raise argparse.ArgumentError(None, f"`--steps {steps}` must be at least 1")
    make = partial(ConfiguredProgram, arguments=arguments, device=device, steps=steps)
    program = in_the_namespace_of_the_model(make)
    is_right, outcome = ProgramCheck(program, device).run()
    print(f"\n{versions_and_machine(device)}, {program.name}: {outcome}")
    return is_right


class ProgramCheck:
    """Compares the runs of a program.

    Args:
        program: Builds the program, and trains it.
        device: The device that it computes on.
    """

    def __init__(self, program: ConfiguredProgram, device: torch.device) -> None:
        self._program = program
        self._is_exact = device.type == "cpu"
        self._plain = Trace()
        self._left_out: list[str] = []  # numbers that plain training does not repeat, and need not
        self._first_wrong = ""
        self._unused: list[str] = []  # for each way that could not be exercised, the reason

    def run(self) -> tuple[bool, str]:
        """Compare all ways with plain training, with a line for each; tell whether all are right, and say so."""
        self._plain = self._train_plainly()
        # updates, and what comes after them, which a GPU may round differently, are compared by value
        later = dropwhile(lambda label: not label.when.startswith("after step"), self._plain.digests)
        rounded = [label for label in later if label.what not in _ALWAYS_EQUAL and not self._is_exact]
        again = self._train(None, Look.GRADIENTS, keep=rounded)
        changes = self._plain.differences(again) + again.differences(self._plain)
        changed = next((label for label in changes if label.must_repeat), None)
        if changed is not None:
            return False, (
                f"plain training does not repeat itself: {changed} differs between two runs with "
                "the same seed. Nothing can be compared until you fix the cause, such as data "
                "in a random order"
            )
        self._plain.values = again.values
        self._left_out = list(dict.fromkeys(label.what for label in changes))
        same = f"the same numbers in {self._plain.steps} steps"
        say(f"{self._program.name}, plain training, twice: {same}")
        if self._left_out:
            say(f"Not compared (different in the two plain runs): {', '.join(self._left_out)}")
        # this is too little memory for all units to stay on the GPU with gradients and optimizer state
        ways = list(all_ways(self._program.options, budget=3 * self._plain.weight_bytes))
        wrong = [way for way in ways if not self._is_right(way)]
        left = "which units leave unless they are updated in backward"
        say(f"Not compared: gradients after the run, {left}")
        if wrong:
            return False, f"wrong in {len(wrong)} of {len(ways)} ways; {self._first_wrong}"
        outcome = f"right in {len(ways) - len(self._unused)} ways"
        if self._unused:
            outcome += f"; {len(self._unused)} do not apply here, because {' and '.join(dict.fromkeys(self._unused))}"
        return True, outcome

    def _train(self, way: Way | None, look: Look, keep: Collection[Label] = ()) -> Trace:
        observer = Observer(look, keep, self._left_out)
        self._program.train(observer, way, reads_gradients=look is Look.GRADIENTS)
        return observer.trace

    def _train_plainly(self) -> Trace:
        """Train without this package, and refuse a program that cannot be compared."""
        name = self._program.name
        try:
            plain = self._train(None, Look.GRADIENTS)
        except self._program.misconfiguration as error:
            raise argparse.ArgumentError(None, f"{name} cannot be trained: {error}") from error
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise argparse.ArgumentError(
                None,
                f"{name} does not fit the device in plain training, so there is nothing to compare with. "
                f"Configure fewer layers, or name no device to check it on the CPU ({error})",
            ) from error
        if not plain.steps:
            words = f"{name} took no optimizer step. It needs data for at least one"
            raise argparse.ArgumentError(None, words)
        return plain

    def _is_right(self, way: Way) -> bool:
        """Train in one way, and print a line on its numbers."""
        begin = f"  {way.placement.value:<35} {way.options.activations:<10}"
        look = Look.RESULTS if way.hides_gradients else Look.GRADIENTS
        verdict = "OTHER NUMBERS"
        try:
            streamed = self._train(way, look, keep=self._plain.values)
            difference = self._difference(way, streamed)
        except Exception as error:  # any error of a program: other ways may not have it
            verdict, difference = "FAILED", f"it raised {type(error).__name__}: {error}"
        if difference:
            say(f"{begin} {verdict}: {difference}")
            self._first_wrong = self._first_wrong or f"{way}: {difference}"
            return False
        done = ""
        if (counts := streamed.counts) is not None:
            reason = way.why_not_exercised(counts)
            self._unused += [reason] if reason else []
            done = f"not exercised: {reason}" if reason else str(counts)
        apart = self._rounding(streamed)
        same = f"same but for the optimizer's rounding, {apart:.0e}" if apart else "same bits"
        say(f"{begin} {same}; {done}")
        return True

    def _difference(self, way: Way, streamed: Trace) -> str:
        """Name the difference from plain training; the text is empty if there is none."""
        label = self._first_difference(streamed)
        if label is None:
            apart = self._rounding(streamed)
            if apart <= _ROUNDING:
                return ""
            return f"{apart:.0e} apart after an update, too much for rounding"
        # runs that look more closely take time, and one of them shows what to look for
        return f"{label} differs" if self._first_wrong else self._describe(way, label)

    def _first_difference(self, streamed: Trace) -> Label | None:
        """Return the label of the first number that is not that of plain training, without those compared by value."""
        labels = self._plain.differences(streamed)
        return next((label for label in labels if label not in self._plain.values), None)

    def _rounding(self, streamed: Trace) -> float:
        """Return the distance of numbers after an update, where they need not be equal."""
        plain, other = self._plain.values, streamed.values
        seen = [label for label in plain if label in other]
        return max((relative_difference(plain[label], other[label]) for label in seen), default=0.0)

    def _describe(self, way: Way, label: Label) -> str:
        """Name the first number that differs when the run is looked at more closely, and say by how much."""
        look = Look.WEIGHTS if way.hides_gradients else Look.GRADIENTS
        closer = self._first_difference(self._train(way, look))
        note = ""
        if closer is None:
            look = Look.RESULTS
            note = "; the difference vanishes when weights are read after each step"
        label = closer or label
        plain = self._train(None, Look.GRADIENTS, keep=[label]).values.get(label)
        streamed = self._train(way, look, keep=[label]).values.get(label)
        return f"{label} {describe_difference(plain, streamed)}{note}"
