"""Before the optimizer's step: steps in backward, then clipping and unscaling of gradients.

[Note: steps in backward]
Units are updated before the optimizer's `step()` is called, as soon as gradients have landed. A scope around that
backward pass vouches for two things: `optimizer.step()` will follow, with the settings that the optimizer has now, and
no code looks at gradients in between. Code that does gets an error.

[Note: clipping and unscaling]
Between backward and the step, gradients may still be on their way to the host, and only the optimizer reads them, once.
So the engine records clipping and unscaling, and applies them as the optimizer reads, with the operations that torch
would use. Norms come with the gradients. Gradients of parameters that do not stream (those of units that stay on the
device, for example) are clipped and unscaled at once, by the same norm, for which the host waits. If none streams,
torch clips.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.segment_gradients import Gradient, SegmentGradients
from sp_lightning.pipeline.lanes.at_work import EngineAtWork
from sp_lightning.pipeline.lanes.lanes import Job
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.optimizer.kinds import OptimizerWeights, Step, parameters_of, settings_of
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.weights.segment import MEASURED


class EarlyStep(Step):
    """A step of an optimizer that updates units in backward, before its `step()` is called.

    A unit is updated only if no node of the graph holds one of its weights on the device any more.

    Attributes:
        keeps_gradients: Whether gradients are kept after the step.
        stepped: The gradients that the step has used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_weights: OptimizerWeights,
        steps: UnitSteps,
        keeps_gradients: bool,
    ) -> None:
        super().__init__(optimizer, optimizer_weights, steps.fused)
        self.keeps_gradients = keeps_gradients
        self.stepped: list[SegmentGradients] = []
        self._steps = steps
        self._had_state = set(optimizer.state)  # the parameters that had state before the step

    # ------------------------------------------------------------------------------------------------- in backward

    def wants(self, of_segment: SegmentGradients) -> bool:
        """Tell whether these complete gradients are all of their unit's, so that it can be updated right away."""
        unit = of_segment.unit
        # Split-off weights would have to wait for the step. An alias must not show the step before backward is over.
        readers = unit.readers
        if unit.resident or unit.split_off or readers.handles or readers.has_aliases:
            return False
        if readers.has_raw_readers and readers.calls_to_come:
            return False
        trained = sum(weight.master.requires_grad for weight in unit.weights)
        gradients = of_segment.trained
        return trained == len(gradients) and self.optimizer_weights.gradients.keys() >= set(gradients)

    def step_with(self, of_segment: SegmentGradients) -> None:
        """Step a unit with its gradients, here or in the process that owns it, and drop these unless they are kept."""
        unit, steps = of_segment.unit, self._steps
        averages = steps.stream.averages
        if averages is not None:
            averages.pass_on(of_segment, steps.window.copies_of([unit]))
        if not unit.is_stepped_elsewhere:  # otherwise the process that owns the unit collects them
            self.collect_gradients(of_segment.trained)
        steps.step(unit, self)
        if unit.update.pending_visit is not None and steps.visits.begin_in_backward:
            unit.update.pending_visit.begin(in_place=False)
        if unit in self.awaited and averages is None:
            steps.finish([unit])
        unit.update.is_early_in_all_processes = averages is not None
        of_segment.consume()
        self.stepped.append(of_segment)
        if not self.keeps_gradients:
            steps.stream.consume(of_segment.trained)
        steps.window.stats.steps_in_backward += 1

    # -------------------------------------------------------------------------------------------------- after backward

    def acknowledge(self) -> None:
        """Acknowledge the units that were stepped: the optimizer's `step()` was called."""
        if self.awaited:
            # These steps need other processes, for which backward could not wait.
            self._steps.finish(self.awaited)
            state = self.optimizer.state
            for parameter in parameters_of(self.optimizer):
                if parameter in state and parameter not in self._had_state:
                    # torch makes state in the order of parameters
                    state[parameter] = state.pop(parameter)
        for of_segment in self.stepped:
            of_segment.unit.update.is_early_in_all_processes = False
            of_segment.acknowledge_step()

    def abandon(self) -> None:
        """Give up after an error: `step()` will not be called. Warn if not all weights have been stepped."""
        self.acknowledge()
        trained = sum(weight.master.requires_grad for weight in self.optimizer_weights.weights)
        stepped = sum(len(of_segment.trained) for of_segment in self.stepped)
        if 0 < stepped < trained:
            warnings.warn(
                "superpipeline: the exception came while the optimizer was updating weights in backward. "
                f"{stepped} weights have taken this step, {trained - stepped} have not. Continue from a "
                "checkpoint, or train with `overlap_optimizer=False`.",
                stacklevel=2,
            )

    def check_promises(
        self,
        optimizer: Optimizer,
        optimizer_weights: OptimizerWeights,
        why_not: str | None,
    ) -> None:
        """Raise if the scope's promises are broken when an optimizer's `step()` is called.

        `why_not` is the reason why units cannot be stepped one by one now; None if they can.
        """
        broken_promise = None
        if optimizer is not self.optimizer:
            stepped = chain.from_iterable(of_segment.trained for of_segment in self.stepped)
            if not optimizer_weights.gradients.keys().isdisjoint(stepped):
                broken_promise = f"{type(optimizer).__name__} is about to update some of their weights before `step()`"
        elif why_not is not None:
            broken_promise = why_not
        elif self.settings != settings_of(optimizer, self.fused):
            broken_promise = (
                "its param groups were changed before `step()`. Set learning rates and similar "
                "options before backward or after the step"
            )
        if broken_promise is not None:
            name = type(self.optimizer).__name__
            raise RuntimeError(
                f"{name} has updated units in backward, but now {broken_promise}. Train with `overlap_optimizer=False`."
            )


_LOG = logging.getLogger(__name__)


@dataclass
class _Norm:
    """The norm of one gradient, which is known when everything has landed."""

    gradient: Tensor
    norm: Tensor | None = None  # None if it has to be measured
    factors: Sequence[Tensor] = ()  # the update will multiply the gradient by these

    def measure(self, dtype: torch.dtype) -> Tensor:
        norm = self.norm
        if norm is None:
            norm = torch.linalg.vector_norm(self.gradient, dtype=dtype)
        norm = norm.to(dtype=dtype, device="cpu")
        for factor in self.factors:
            norm = norm * factor
        return norm


class _FoundGradients:
    """The gradients of the parameters that are to be clipped or unscaled.

    Attributes:
        norms: The norms of all gradients, in the order of the parameters, in which torch adds them up.
        ours: The gradients of weights that the engine has.
        others: The other gradients, which are in a `.grad`.
        unmeasured: The norms of the others, and of gradients on a device that did not measure them.
        why_torch_reads: The reason why torch has to read all gradients itself; None if it need not.
    """

    def __init__(self) -> None:
        self.norms: list[_Norm] = []
        self.ours: list[Gradient] = []
        self.others: list[Tensor] = []
        self.unmeasured: list[_Norm] = []
        self.why_torch_reads: str | None = None

    def measure_here(self, dtype: torch.dtype) -> None:
        """Measure norms in this thread, which has computed the gradients; the host waits once for each device."""
        for device in {each.gradient.device for each in self.unmeasured}:
            missing_there = [each for each in self.unmeasured if each.gradient.device == device]
            norms = torch._foreach_norm([each.gradient for each in missing_there], 2, dtype)
            for each, norm in zip(missing_there, torch.stack(norms).cpu(), strict=True):
                each.norm = norm

    def scale(self, factor: Tensor) -> None:
        """Multiply gradients by a factor on the host: ours when they are read, the others now, wherever they are."""
        for gradient in self.ours:
            gradient.scale(factor)
        for other in self.others:
            other.mul_(factor)


def _total(norms: Sequence[_Norm], dtype: torch.dtype) -> Tensor:
    """Return the norm of all gradients, from those of each."""
    with untracked():
        measured = torch.stack([norm.measure(dtype) for norm in norms])
        total: Tensor = torch.linalg.vector_norm(measured)
        return total


def _find_factor(norms: Sequence[_Norm], max_norm: float, factor: Tensor) -> None:
    """Write the factor that clips gradients to a norm, from the norms of all."""
    total = _total(norms, factor.dtype)
    with untracked():
        torch.clamp(max_norm / (total + 1e-6), max=1.0, out=factor)


class Clipping:
    """Clips and unscales gradients; where possible, while the optimizer reads them."""

    def __init__(self, at_work: EngineAtWork) -> None:
        self._at_work = at_work

    def work_with(self, steps: UnitSteps, gradients: Mapping[int, Gradient]) -> None:
        """Clip these gradients of weights, known by the identities of their masters, from now on."""
        self._stream = steps.stream
        self._backend = steps.window.backend
        self._gradients = gradients

    @contextmanager
    def measuring_norms(self) -> Iterator[None]:
        """Measure norms in the backward pass of this scope, for `clip_grad_norm` and `unscale`."""
        self._stream.routes.measures_norms = True
        try:
            yield
        finally:
            self._stream.routes.measures_norms = False

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Clip as `torch.nn.utils.clip_grad_norm_` does.

        Gradients of parameters that do not stream are clipped at once. For these the host waits until all have landed.
        """
        parameters = list(parameters)
        found_gradients = self._find_gradients(parameters)
        with self._at_work:
            why_torch_clips = self._why_torch_clips(found_gradients)
            if why_torch_clips is None:
                self._clip_norm(found_gradients, max_norm)
                return
        _LOG.debug("Torch clips gradients and reads all of them, because %s.", why_torch_clips)
        nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor | None:
        """Clip gradients, and return their norm, for which the host waits.

        Return None, and change nothing, if no weight streams, if torch has to read gradients, or if the norm is not
        finite. From the first call on, each backward pass measures norms.
        """
        if not any(id(parameter) in self._gradients for parameter in parameters):
            return None
        found_gradients = self._find_gradients(parameters)
        with self._at_work:
            if self._why_torch_clips(found_gradients) is not None:
                return None
            self._stream.routes.measures_norms = True
            self._stream.settle()
            dtype = found_gradients.ours[0].weight.dtype
            found_gradients.measure_here(dtype)
            total = _total(found_gradients.norms, dtype)
            if not total.isfinite():
                return None
            self._clip_norm(found_gradients, max_norm)
            return total

    def unscale(self, optimizer: Optimizer, inverse_scale: Tensor) -> bool | None:
        """Unscale as `GradScaler.unscale_` does, by a factor on the host; tell whether a gradient is not finite.

        If no gradient brings its norm, return None, and change nothing.
        """
        found_gradients = self._find_gradients(parameters_of(optimizer))
        with self._at_work:
            ours = found_gradients.ours
            if found_gradients.why_torch_reads is not None or not ours:
                return None
            if any(gradient.norm is None for gradient in ours):
                return None  # only reading all of them could tell
            self._stream.settle()
            found_gradients.measure_here(torch.float32)
            overflow = False
            for gradient_norm in found_gradients.norms:
                # A norm may overflow though all elements are finite.
                if not gradient_norm.measure(torch.float32).isfinite():
                    overflow |= not gradient_norm.gradient.isfinite().all()
            found_gradients.scale(inverse_scale.clone())
            return overflow

    def _clip_norm(self, found_gradients: _FoundGradients, max_norm: float) -> None:
        ours = found_gradients.ours
        dtype = ours[0].weight.dtype
        with torch.inference_mode(False):
            factor = torch.empty((), dtype=dtype, device="cpu")
        by_segment = {gradient.of_segment: None for gradient in ours}
        landed = [of_segment.ticket for of_segment in by_segment if of_segment.ticket is not None]
        found_gradients.measure_here(dtype)
        # torch takes a tensor for a number, too: otherwise the factor would be rounded
        job = Job(partial(_find_factor, found_gradients.norms, float(max_norm), factor), landed)
        ticket = self._backend.work(job)
        for of_segment in by_segment:
            of_segment.ticket = ticket
        if found_gradients.others:
            ticket.join()
        found_gradients.scale(factor)

    def _why_torch_clips(self, found_gradients: _FoundGradients) -> str | None:
        """Return why norms would have other bits than torch's; None if they have the same."""
        if found_gradients.why_torch_reads is not None:
            return found_gradients.why_torch_reads
        ours = found_gradients.ours
        if not ours:
            return "all gradients are on the GPU, where torch computes their norms without waiting"
        dtypes = {gradient.weight.dtype for gradient in ours}
        dtypes.update(other.dtype for other in found_gradients.others)
        if len(dtypes) != 1 or not dtypes <= MEASURED:
            return "gradients are of several dtypes, or of one whose norms do not travel"
        factors = ours[0].factors
        if any(gradient.factors != factors for gradient in ours):
            return "some gradients are scaled in another way than others"
        if factors:
            self._stream.settle()  # an earlier clip may still compute one of the factors
        # Powers of two scale a norm exactly as they scale the gradient.
        if not all(math.frexp(float(factor))[0] == 0.5 for factor in factors):
            return "a scaled norm rounds in another way than the norm of what is scaled"
        return None

    def _find_gradients(self, parameters: Iterable[Tensor]) -> _FoundGradients:
        """Find the gradients of parameters, while this engine is not at work: guards show those of other models."""
        found_gradients = _FoundGradients()
        for parameter in parameters:
            gradient = self._gradients.get(id(parameter))
            if gradient is not None:
                gradient.check_readable()
            if gradient is not None and gradient.tensor is not None:
                norm = _Norm(gradient.tensor, gradient.norm, gradient.factors)
                found_gradients.norms.append(norm)
                found_gradients.ours.append(gradient)
                if gradient.norm is None and gradient.is_on_device:
                    found_gradients.unmeasured.append(norm)
            elif (user_gradient := parameter.grad) is not None:
                if gradient is not None:
                    found_gradients.why_torch_reads = f"the gradient of {gradient.weight.name!r} is the user's"
                elif type(user_gradient) is not Tensor or user_gradient.layout is not torch.strided:
                    found_gradients.why_torch_reads = "a gradient is not a plain tensor"
                norm = _Norm(user_gradient)
                found_gradients.norms.append(norm)
                found_gradients.others.append(user_gradient)
                found_gradients.unmeasured.append(norm)
        return found_gradients
