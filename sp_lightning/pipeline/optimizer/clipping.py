"""Clipping and unscaling of gradients, between backward and the optimizer's step.

Gradients may still be on their way to the host then, and only the optimizer reads them, once. So clipping and unscaling
are recorded, and applied as it reads, with the operations that torch would use. Norms come with the gradients.
Gradients of units that live on the device are clipped and unscaled at once, by the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.pipeline.gradients.scaling import NO_SCALING, Scaling
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.gradients.unit_gradients import Gradient, State
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.optimizer.kinds import parameters_of
from sp_lightning.pipeline.weights.weight import Weight


class Clipping:
    """Clips and unscales the gradients of an arrangement's weights."""

    def __init__(
        self,
        weights: Mapping[int, Weight],
        on_device: Sequence[nn.Parameter],
        backend: Backend,
        stream: GradientStream,
    ) -> None:
        self._weights = weights
        self._on_device = set(map(id, on_device))
        self._backend = backend
        self._stream = stream

    def clip_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> bool:
        """Clip gradients by their total norm when they are read, as `clip_grad_norm_` would now.

        If some of them are on the device, those are clipped now, and the host waits until all others have landed.

        Returns:
            Whether that is possible: nobody has read the gradients, or set others.
        """
        found = self._with_gradients(parameters)
        if not found or any(parameter.dtype != torch.float32 for parameter in found.parameters):
            return False
        held = [(gradient.norm, gradient.host) for gradient in found.gradients]
        if any(tensor is None for _, tensor in held):
            return False
        scalings = {id(gradient.scaling): gradient.scaling for gradient in found.gradients}
        scaling = next(iter(scalings.values()), NO_SCALING)
        if scaling.factors:
            self._stream.settle()  # one of them may be computed by an earlier clip
        # a power of two scales the norm exactly as it scales the gradient, to the last bit; other factors do not
        if len(scalings) > 1 or scaling.clamp is not None or not all(map(_is_power_of_two, scaling.factors)):
            return False
        norms_on_device = _norms(found.on_device)
        with torch.inference_mode(False):
            factor = torch.empty(())

        def job() -> None:
            with torch.inference_mode(False), torch.no_grad():
                arrived = [_norm(tensor) if norm is None else norm for norm, tensor in held]
                for earlier in scaling.factors:
                    arrived = list(torch.stack(arrived).mul_(earlier).unbind())
                total = torch.linalg.vector_norm(torch.stack(found.in_order(arrived, norms_on_device)))
                torch.clamp(max_norm / (total + 1e-6), max=1.0, out=factor)

        units = {gradient.unit: None for gradient in found.gradients}
        ticket = self._backend.work(job, [unit.ticket for unit in units if unit.ticket is not None])
        self._rescale(found.gradients, lambda scaling: scaling.times(factor))
        for gradient in found.gradients:
            gradient.norm = None
        for unit in units:
            unit.ticket, unit.state = ticket, State.LEAVING
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
        if found is None or any(gradient.host is None for gradient in found.gradients):
            return False
        self._rescale(found.gradients, lambda scaling: scaling.clamped(limit))
        if found.on_device:
            nn.utils.clip_grad_value_(found.on_device, limit)
        return True

    def not_stepped(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the parameters that have not been clipped and stepped in backward."""
        weights = ((parameter, self._weights.get(id(parameter))) for parameter in parameters)
        return [p for p, w in weights if w is None or self._stream.of(w).unit.state is not State.CONSUMED]

    def unscale(self, optimizer: Optimizer, inverse_scale: Tensor) -> bool | None:
        """Multiply gradients by the inverse of a loss scale when they are read; those on the device now.

        Returns:
            Whether one of them is not finite; None if only reading all of them could tell, and nothing was done.
        """
        found = self._with_gradients(parameters_of(optimizer))
        norms = None if found is None else _norms_of(found.gradients)
        if found is None or norms is None:
            return None
        self._stream.settle()
        gradients = [gradient.host for gradient in found.gradients]
        gradients += [parameter.grad for parameter in found.on_device]
        suspects = [  # a norm may have overflowed though all elements are finite
            gradient
            for gradient, norm in zip(gradients, [*norms, *_norms(found.on_device)], strict=True)
            if not norm.isfinite()
        ]
        overflow = not all(gradient is None or bool(gradient.isfinite().all()) for gradient in suspects)
        factor = inverse_scale.clone()
        self._rescale(found.gradients, lambda scaling: scaling.times(factor))
        _multiply(found.on_device, inverse_scale)
        return overflow

    def _rescale(self, gradients: Sequence[Gradient], change: Callable[[Scaling], Scaling]) -> None:
        """Have gradients that the engine has scaled when they are read."""
        changed: dict[int, Scaling] = {}  # those that are scaled alike share an object
        for gradient in gradients:
            before = gradient.scaling
            if before.clamp is not None:  # a `Scaling` clips last, so nothing can follow that
                before = self._apply(gradient)
            gradient.scaling = changed.setdefault(id(before), change(before))

    def _apply(self, gradient: Gradient) -> Scaling:
        """Apply to a gradient what is recorded, in memory of its own."""
        gradient.unit.wait()
        assert gradient.host is not None
        scaled = torch.empty_like(gradient.weight.host).copy_(gradient.host)
        gradient.scaling.apply_(scaled)
        gradient.host, gradient.norm = scaled, None
        return NO_SCALING

    def _with_gradients(self, parameters: Iterable[nn.Parameter]) -> _Found | None:
        """Return the parameters that have a gradient; None if one of them is not ours, or its gradient not dense."""
        found = _Found()
        for parameter in parameters:
            weight = self._weights.get(id(parameter))
            gradient = None if weight is None else self._stream.of(weight)
            tensor = parameter.grad if gradient is None or gradient.host is None else gradient.host
            if tensor is None:
                continue
            if tensor.layout is not torch.strided or (weight is None and id(parameter) not in self._on_device):
                return None
            found.add(parameter, gradient)
        return found


class _Found:
    """Parameters that have a gradient.

    Attributes:
        parameters: All of them.
        gradients: The gradients of the weights among them, which come to the host.
        on_device: Those that live on the device.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.gradients: list[Gradient] = []
        self.on_device: list[nn.Parameter] = []
        self._travels: list[bool] = []

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def add(self, parameter: nn.Parameter, gradient: Gradient | None) -> None:
        """Add a parameter, which lives on the device if it has no gradient that travels."""
        self.parameters.append(parameter)
        self._travels.append(gradient is not None)
        if gradient is None:
            self.on_device.append(parameter)
        else:
            self.gradients.append(gradient)

    def in_order(self, of_weights: Iterable[Tensor], on_device: Iterable[Tensor]) -> list[Tensor]:
        """Merge tensors of weights and of parameters on the device in the order of the parameters."""
        weights, others = iter(of_weights), iter(on_device)
        return [next(weights if travels else others) for travels in self._travels]


def _norms_of(gradients: Sequence[Gradient]) -> list[Tensor] | None:
    """Return the norms of gradients as they came, to be read once these have landed; None if one is not known."""
    known = [gradient.norm for gradient in gradients if gradient.norm is not None]
    return known if len(known) == len(gradients) else None


def _norm(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


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
