"""Clipping and unscaling: what comes between backward and the optimizer's step.

Gradients may still be on their way to the host then, and are read only once, by the optimizer. So what is to be done to
them is noted, and done as they are read, with the operations that torch would use. Norms came with the gradients. Those
of units that live on the device are there already: they are clipped and unscaled at once, by the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.host_gradients import HostGradients
from sp_lightning.pipeline.gradients.scaling import NO_SCALING
from sp_lightning.pipeline.optimizer.in_backward import InBackward
from sp_lightning.pipeline.transfer.backend import Backend
from sp_lightning.pipeline.weights.weight import Weight


class Clipping:
    """Clips and unscales the gradients of an arrangement's weights.

    Args:
        weights: All weights, by the identity of their masters.
        on_device: Parameters that live on the device.
        backend: Has the thread for work on the host.
        gradients: Those of the weights.
        in_backward: Knows what has been stepped already.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        on_device: Sequence[nn.Parameter],
        backend: Backend,
        gradients: HostGradients,
        in_backward: InBackward,
    ) -> None:
        self._weights = weights
        self._on_device = set(map(id, on_device))
        self._backend = backend
        self._gradients = gradients
        self._in_backward = in_backward

    def clip_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> bool:
        """Clip gradients by their total norm, when they are read, as `clip_grad_norm_` would now.

        Those on the device are clipped now, and the host waits until all others have landed.

        Returns:
            Whether that is possible: the norms came with the gradients, and nobody has changed these since.
        """
        found = self._with_gradients(parameters)
        norms = None if found is None else self._gradients.norms_of(found.weights)
        if not found or norms is None or any(parameter.dtype != torch.float32 for parameter in found.parameters):
            return False
        scalings = {id(scaling): scaling for scaling in map(self._gradients.scaling_of, found.weights)}
        scaling = next(iter(scalings.values()), NO_SCALING)
        # the norm of what a power of two was multiplied with is the norm times that, to the last bit
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

        ticket = self._backend.work(job, self._gradients.on_its_way(found.weights))
        self._gradients.multiply(found.weights, factor)
        self._gradients.wait_for(found.weights, ticket)
        if found.on_device:
            self._backend.synchronize(ticket)
            _multiply(found.on_device, factor)
        return True

    def clip_value(self, parameters: Iterable[nn.Parameter], limit: float) -> bool:
        """Clip gradients by value, when they are read; those that were clipped and stepped in backward are left."""
        found = self._with_gradients(self.not_stepped(parameters))
        if found is None:
            return False
        self._gradients.clamp(found.weights, limit)
        if found.on_device:
            nn.utils.clip_grad_value_(found.on_device, limit)
        return True

    def not_stepped(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of them that have not been clipped and stepped in backward."""
        weights = ((parameter, self._weights.get(id(parameter))) for parameter in parameters)
        return [p for p, weight in weights if weight is None or not self._in_backward.awaits_step(weight)]

    def unscale(self, optimizer: Optimizer, inverse_scale: Tensor) -> bool | None:
        """Multiply gradients with the inverse of a loss scale, when they are read; those on the device now.

        Returns:
            Whether one of them is not finite; None if that is not known without reading them all.
        """
        found = self._with_gradients(p for group in optimizer.param_groups for p in group["params"])
        norms = None if found is None else self._gradients.norms_of(found.weights)
        if found is None or norms is None:
            return None
        self._gradients.settle()
        gradients = [self._gradients.get(weight) for weight in found.weights]
        gradients += [parameter.grad for parameter in found.on_device]
        suspects = [  # the square may have been too large
            gradient
            for gradient, norm in zip(gradients, [*norms, *_norms(found.on_device)], strict=True)
            if not norm.isfinite()
        ]
        overflow = not all(gradient is None or bool(gradient.isfinite().all()) for gradient in suspects)
        self._gradients.multiply(found.weights, inverse_scale.clone())
        _multiply(found.on_device, inverse_scale)
        return overflow

    def _with_gradients(self, parameters: Iterable[nn.Parameter]) -> _Found | None:
        """Those that have a gradient; None if one of them is not ours, or its gradient not dense."""
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
        weights: Those whose gradients come to the host.
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
        """One more; without a weight it lives on the device."""
        self.parameters.append(parameter)
        self._travels.append(weight is not None)
        if weight is None:
            self.on_device.append(parameter)
        else:
            self.weights.append(weight)

    def in_order(self, of_weights: Iterable[Tensor], on_device: Iterable[Tensor]) -> list[Tensor]:
        """What belongs to weights, and what to those on the device, in the order of the parameters."""
        weights, others = iter(of_weights), iter(on_device)
        return [next(weights if travels else others) for travels in self._travels]


def _norms(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Norms of gradients on the device, for the host, which waits for them."""
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
