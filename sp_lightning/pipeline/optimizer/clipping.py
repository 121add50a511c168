"""Clipping and unscaling of gradients, between backward and the optimizer's step.

Gradients may still be on their way to the host then, and only the optimizer reads them, once. So the engine records
clipping and unscaling, and applies them as the optimizer reads, with the operations that torch would use. Norms come
with the gradients. Gradients of parameters that do not stream (those of units that stay on the device, for example) are
clipped and unscaled at once, by the same norm, for which the host waits. If none streams, torch clips.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.lanes.at_work import EngineAtWork
from sp_lightning.pipeline.lanes.lanes import Job
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.optimizer.kinds import parameters_of
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.weights.segment import MEASURED

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
        _LOG.debug("Torch clips gradients, and so reads all of them: %s.", why_torch_clips)
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
                    found_gradients.why_torch_reads = "a gradient is no plain tensor"
                norm = _Norm(user_gradient)
                found_gradients.norms.append(norm)
                found_gradients.others.append(user_gradient)
                found_gradients.unmeasured.append(norm)
        return found_gradients
