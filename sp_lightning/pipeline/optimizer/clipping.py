"""Clipping and unscaling of gradients, between backward and the optimizer's step.

Gradients may still be on their way to the host then, and only the optimizer reads them, once. So clipping and unscaling
are recorded, and applied as it reads, with the operations that torch would use. Norms come with the gradients.
Gradients of parameters that do not stream, as of units that live on the device, are clipped and unscaled at once, by
the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.unit_gradients import NO_SCALING, Gradient, Scaling, State
from sp_lightning.pipeline.lanes.at_work import EngineAtWork
from sp_lightning.pipeline.optimizer.group_steps import GroupSteps
from sp_lightning.pipeline.optimizer.kinds import parameters_of
from sp_lightning.pipeline.weights.gradient_layout import MEASURED
from sp_lightning.pipeline.weights.weight import Weight

_Found = Sequence[Gradient | Tensor]
"""Gradients of parameters: ours, and the `.grad` of those that do not stream."""


class Clipping:
    """Clips and unscales gradients; where possible, while the optimizer reads them."""

    _steps: GroupSteps

    def __init__(self, at_work: EngineAtWork) -> None:
        self._at_work = at_work
        self._weights: Mapping[int, Weight] = {}

    @contextmanager
    def measuring_norms(self) -> Iterator[None]:
        """Have gradients of the backward pass in this scope bring their norms, for `clip_grad_norm` and `unscale`."""
        self._steps.stream.measures_norms = True
        try:
            yield
        finally:
            self._steps.stream.measures_norms = False

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
        """Clip as `torch.nn.utils.clip_grad_norm_` does.

        If some of the parameters do not stream, those are clipped now, and the host waits until all others have landed.
        """
        parameters = list(parameters)
        with self._at_work:
            done = self._clip_norm(self._find(parameters), max_norm)
        if not done:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: Iterable[nn.Parameter], limit: float) -> None:
        """Clip as `torch.nn.utils.clip_grad_value_` does, except what was clipped and stepped in backward."""
        with self._at_work:
            weights = ((p, self._weights.get(id(p))) for p in parameters)
            stream = self._steps.stream
            left = [p for p, w in weights if w is None or stream.of[w].unit.state is not State.CONSUMED]
            found = self._find(left)
            if found is not None:
                for gradient in _ours(found):
                    gradient.scaling = Scaling(gradient.scaling.factors, limit)
                left = [p for p in left if id(p) not in self._weights and p.grad is not None]
        if left:
            nn.utils.clip_grad_value_(left, limit)

    def unscale(self, optimizer: Optimizer, inverse_scale: Tensor) -> bool | None:
        """Unscale as `GradScaler.unscale_` does, by a factor on the host; tell whether a gradient is not finite.

        If the gradients did not bring their norms, nothing is done, and None is returned.
        """
        with self._at_work:
            found = self._find(parameters_of(optimizer))
            if found is None:
                return None
            gradients, others = _ours(found), _others(found)
            measured = [(each.host, each.norm) for each in gradients if each.host is not None and each.norm is not None]
            if len(measured) < len(gradients):
                return None  # only reading all of them could tell
            self._steps.stream.settle()
            measured += zip(others, _norms(others, torch.float32), strict=True)
            # a norm may have overflowed though all elements are finite
            overflow = any(not norm.isfinite() and not tensor.isfinite().all() for tensor, norm in measured)
            factor = inverse_scale.clone()
            for gradient in gradients:
                gradient.scaling = gradient.scaling.times(factor)
            _multiply(others, inverse_scale)
            return overflow

    def _clip_norm(self, found: _Found | None, max_norm: float) -> bool:
        """Clip by norm if nobody else could look at the gradients, and torch's bits can be had; tell whether."""
        dtypes = {each.weight.dtype if isinstance(each, Gradient) else each.dtype for each in found or ()}
        if not found or len(dtypes) > 1 or not dtypes <= MEASURED:
            return False
        dtype = dtypes.pop()
        gradients, others = _ours(found), _others(found)
        scaling = gradients[0].scaling if gradients else NO_SCALING
        if scaling.factors:
            self._steps.stream.settle()  # one of them may be computed by an earlier clip
        # a power of two scales the norm exactly as it scales the gradient, to the last bit; other factors do not
        is_exact = all(math.frexp(float(factor))[0] == 0.5 for factor in scaling.factors)
        if not is_exact or any(each.scaling != scaling for each in gradients):
            return False
        norms_of_others = _norms(others, dtype)
        # for each the norm, where it is known already, and else what it is the norm of, which may be on its way
        held: list[tuple[Tensor | None, Tensor | None]] = []
        for each in found:  # in their order, in which torch adds up their norms
            if isinstance(each, Gradient):
                held.append((each.norm, each.host))
            else:
                held.append((norms_of_others.pop(0), None))
        with torch.inference_mode(False):
            factor = torch.empty((), dtype=dtype, device="cpu")

        def job() -> None:
            with torch.inference_mode(False), torch.no_grad():
                norms = []
                for norm, gradient in held:
                    if gradient is not None:
                        norm = torch.linalg.vector_norm(gradient, dtype=dtype) if norm is None else norm.to(dtype)
                        for earlier in scaling.factors:
                            norm = norm * earlier
                    norms.append(norm)
                total = torch.linalg.vector_norm(torch.stack(norms))  # type: ignore[arg-type]
                torch.clamp(max_norm / (total + 1e-6), max=1.0, out=factor)

        units = dict.fromkeys(gradient.unit for gradient in gradients)
        ticket = self._steps.window.backend.work(job, [unit.ticket for unit in units if unit.ticket is not None])
        clipped = scaling.times(factor)
        for gradient in gradients:
            gradient.scaling, gradient.norm = clipped, None
        for unit in units:
            unit.ticket = ticket
        if others:
            ticket.join()
            _multiply(others, factor)
        return True

    def _find(self, parameters: Iterable[nn.Parameter]) -> _Found | None:
        """Find the gradients of parameters; None if torch has to see them itself.

        That is so if that of a weight is the user's, if one is no plain tensor, or if one is to be clipped by value,
        after which nothing can follow.
        """
        found: list[Gradient | Tensor] = []
        for parameter in parameters:
            weight = self._weights.get(id(parameter))
            gradient = None if weight is None else self._steps.stream.of[weight]
            if gradient is not None and gradient.host is not None:
                if gradient.scaling.clamp is not None:
                    return None
                found.append(gradient)
            elif (own := parameter.grad) is not None:
                if weight is not None or type(own) is not Tensor or own.layout is not torch.strided:
                    return None
                found.append(own)
        return found


def _ours(found: _Found) -> list[Gradient]:
    return [gradient for gradient in found if isinstance(gradient, Gradient)]


def _others(found: _Found) -> list[Tensor]:
    return [gradient for gradient in found if isinstance(gradient, Tensor)]


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the norms of gradients that do not stream; the host waits for them."""
    return [norm.cpu() for norm in torch._foreach_norm(gradients, 2, dtype)] if gradients else []


def _multiply(gradients: Iterable[Tensor], factor: Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
