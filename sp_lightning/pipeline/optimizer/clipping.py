"""Clipping and unscaling of gradients, between backward and the optimizer's step.

Gradients may still be on their way to the host then, and only the optimizer reads them, once. So clipping and unscaling
are recorded, and applied as it reads, with the operations that torch would use. Norms come with the gradients.
Gradients of units that live on the device are clipped and unscaled at once, by the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.gradients.scaling import NO_SCALING
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.optimizer.early_steps import EarlyStepper
from sp_lightning.pipeline.optimizer.stepping import parameters_of
from sp_lightning.pipeline.weights.weight import Weight


class Clipping:
    """Clips and unscales the gradients of an arrangement's weights.

    Args:
        weights: All weights, by the identity of their masters.
        on_device: Parameters that live on the device.
        backend: Has the thread for work on host memory.
        gradients: The gradients of the weights.
        stepper: Knows which weights have been stepped already.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        on_device: Sequence[nn.Parameter],
        backend: Backend,
        gradients: HostGradients,
        stepper: EarlyStepper,
    ) -> None:
        self._weights = weights
        self._on_device = set(map(id, on_device))
        self._backend = backend
        self._gradients = gradients
        self._stepper = stepper

    def clip_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> bool:
        """Clip gradients by their total norm when they are read, as `clip_grad_norm_` would now.

        If some of them are on the device, those are clipped now, and the host waits until all others have landed.

        Returns:
            Whether that is possible: the norms came with the gradients, and nobody has changed these since.
        """
        found = self._with_gradients(parameters)
        norms = None if found is None else self._gradients.norms_of(found.weights)
        if not found or norms is None or any(parameter.dtype != torch.float32 for parameter in found.parameters):
            return False
        scalings = {id(scaling): scaling for scaling in map(self._gradients.scaling_of, found.weights)}
        scaling = next(iter(scalings.values()), NO_SCALING)
        # a power of two scales the norm exactly as it scales the gradient, to the last bit; other factors do not
        if len(scalings) > 1 or scaling.clamp is not None or not all(map(_is_power_of_two, scaling.factors)):
            return False
        norms_on_device = _norms(found.on_device)
        with torch.inference_mode(False):
            factor = torch.empty(())

        def job() -> None:
            with torch.inference_mode(False), torch.no_grad():
                arrived = norms
                for earlier in scaling.factors:
                    arrived = list(torch.stack(arrived).mul_(earlier).unbind())
                total = torch.linalg.vector_norm(torch.stack(found.in_order(arrived, norms_on_device)))
                torch.clamp(max_norm / (total + 1e-6), max=1.0, out=factor)

        ticket = self._backend.work(job, self._gradients.tickets_of(found.weights))
        self._gradients.multiply(found.weights, factor)
        self._gradients.forget_norms(found.weights)  # or another clip would read the factor before it is there
        self._gradients.mark_under_way(found.weights, ticket)
        if found.on_device:
            self._backend.synchronize(ticket)
            _multiply(found.on_device, factor)
        return True

    def clip_value(self, parameters: Iterable[nn.Parameter], limit: float) -> bool:
        """Clip gradients by value when they are read, except those that were clipped and stepped in backward.

        Returns:
            Whether that is possible: nobody else could look at them. If not, nothing was done.
        """
        found = self._with_gradients(self.not_stepped(parameters))
        if found is None or any(map(self._gradients.is_held, found.weights)):
            return False
        self._gradients.clamp(found.weights, limit)
        if found.on_device:
            nn.utils.clip_grad_value_(found.on_device, limit)
        return True

    def not_stepped(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the parameters that have not been clipped and stepped in backward."""
        weights = ((parameter, self._weights.get(id(parameter))) for parameter in parameters)
        return [p for p, weight in weights if weight is None or not self._stepper.awaits_step(weight)]

    def unscale(self, optimizer: Optimizer, inverse_scale: Tensor) -> bool | None:
        """Multiply gradients by the inverse of a loss scale when they are read; those on the device now.

        Returns:
            Whether one of them is not finite; None if only reading all of them could tell, and nothing was done.
        """
        found = self._with_gradients(parameters_of(optimizer))
        norms = None if found is None else self._gradients.norms_of(found.weights)
        if found is None or norms is None:
            return None
        self._gradients.settle()
        gradients = [self._gradients.get(weight) for weight in found.weights]
        gradients += [parameter.grad for parameter in found.on_device]
        suspects = [  # a norm may have overflowed though all elements are finite
            gradient
            for gradient, norm in zip(gradients, [*norms, *_norms(found.on_device)], strict=True)
            if not norm.isfinite()
        ]
        overflow = not all(gradient is None or bool(gradient.isfinite().all()) for gradient in suspects)
        self._gradients.multiply(found.weights, inverse_scale.clone())
        _multiply(found.on_device, inverse_scale)
        return overflow

    def _with_gradients(self, parameters: Iterable[nn.Parameter]) -> _Found | None:
        """Return the parameters that have a gradient; None if one of them is not ours, or its gradient not dense."""
        found = _Found()
        for parameter in parameters:
            weight = self._weights.get(id(parameter))
            gradient = parameter.grad if weight is None else self._gradients.get(weight)
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or (weight is None and id(parameter) not in self._on_device):
                return None
            found.add(parameter, weight)
        return found


class _Found:
    """Parameters that have a gradient.

    Attributes:
        parameters: All of them.
        weights: The weights among them, whose gradients come to the host.
        on_device: Those that live on the device.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.weights: list[Weight] = []
        self.on_device: list[nn.Parameter] = []
        self._travels: list[bool] = []

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def add(self, parameter: nn.Parameter, weight: Weight | None) -> None:
        """Add a parameter, which lives on the device if it has no `weight`."""
        self.parameters.append(parameter)
        self._travels.append(weight is not None)
        if weight is None:
            self.on_device.append(parameter)
        else:
            self.weights.append(weight)

    def in_order(self, of_weights: Iterable[Tensor], on_device: Iterable[Tensor]) -> list[Tensor]:
        """Merge tensors of weights and of parameters on the device in the order of the parameters."""
        weights, others = iter(of_weights), iter(on_device)
        return [next(weights if travels else others) for travels in self._travels]


def _norms(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the norms of gradients on the device; the host waits for them."""
    if not parameters:
        return []
    gradients = [parameter.grad for parameter in parameters]
    return list(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)).cpu().unbind())  # type: ignore[arg-type]


def _multiply(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    if parameters:
        gradients = [parameter.grad for parameter in parameters]
        torch._foreach_mul_(gradients, factor.to(parameters[0].device))  # type: ignore[arg-type]


def _is_power_of_two(factor: float | Tensor) -> bool:
    return math.frexp(float(factor))[0] == 0.5
