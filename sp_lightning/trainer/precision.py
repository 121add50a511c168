"""Precision plugins with weights on the host: which ones work, their loss scaler, how they clip and run backward."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sp_lightning.pipeline import Pipeline
from sp_lightning.trainer._namespace import Namespace
from sp_lightning.trainer.steps import Steps


class HostGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose scale and growth tracker live in host memory, as gradients do.

    torch puts them on the device of the loss. `unscale_` would then copy the inverse scale and the overflow flag to the
    host with `non_blocking=True`, and might read them before they arrive. The copy in `scale`, host -> device, is from
    pageable memory, and staged before the call returns: a later `update` cannot change what arrives.

    Attributes:
        pipeline: The engine that has the gradients, while a module is attached.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("cpu", **settings)
        self.pipeline: Pipeline | None = None

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # The engine tells overflow from the norms that came with the gradients, and unscales when they are read.
        overflow = None if self.pipeline is None else self.pipeline.optimizers.unscale(optimizer, inv_scale)
        if overflow is None:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            # For gradients on the device: `update` would copy the flag to the host without waiting, too.
            return {device: flag.cpu() for device, flag in found.items()}
        return {found_inf.device: torch.full_like(found_inf, float(overflow))}

    @override
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))


def host_scaler(scaler: torch.amp.GradScaler, lightning: Namespace) -> torch.amp.GradScaler:
    """Return a scaler with the settings and the state of a `MixedPrecision` plugin's that works on host gradients.

    Raises:
        MisconfigurationException: If the scaler is a user's subclass made for another device than the CPU.
    """
    if isinstance(scaler, HostGradScaler) or not scaler.is_enabled():
        return scaler
    if type(scaler) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        host = HostGradScaler()
        host.load_state_dict(scaler.state_dict())
        return host
    lightning.check(
        scaler._device == "cpu",
        f"`MixedPrecision(scaler={type(scaler).__name__}(device={scaler._device!r}))` keeps its scale on the device, "
        "but `strategy='superpipeline'` keeps gradients in host memory. Build the scaler with `device='cpu'`, or "
        "derive it from `sp_lightning.trainer.precision.HostGradScaler`.",
    )
    if scaler._scale is None:  # torch would put the scale on the device of the first loss, whatever `device` says
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return scaler


class _Attached:
    """What stands in for methods of a precision plugin while a module is attached.

    The plugin's `backward` is the innermost method on the way into backward that is not a user's. Hooks, and a
    strategy's own `backward`, are around it, and so not part of the step.
    """

    def __init__(self, plugin: Any, steps: Steps) -> None:
        self._plugin = plugin
        self._steps = steps
        self._optimizers = steps.pipeline.optimizers

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._steps.backward(kwargs):
            type(self._plugin).backward(self._plugin, loss, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._optimizers.clip_grad_norm(self._plugin.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self._optimizers.clip_grad_value(self._plugin.main_params(optimizer), clip_val)


_CLIPS = ("clip_grad_by_norm", "clip_grad_by_value")


def attach(plugin: Any, steps: Steps, lightning: Namespace) -> None:
    """Have a precision plugin run backward, clip and unscale through the engine, until `detach`.

    If a user's own class clips by itself, that is left alone.
    """
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, HostGradScaler):
        scaler.pipeline = steps.pipeline
    attached = _Attached(plugin, steps)
    plugin.backward = attached.backward
    for name in _CLIPS:
        if getattr(type(plugin), name) is getattr(lightning.precision, name):
            setattr(plugin, name, getattr(attached, name))


def detach(plugin: Any) -> None:
    """Undo `attach`: restore the plugin as the user built it."""
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, HostGradScaler):
        scaler.pipeline = None
    for name in ("backward", *_CLIPS):
        vars(plugin).pop(name, None)


def without_engine(plugin: Any) -> Any:
    """Return a copy of a plugin, attached or not, that can be pickled."""
    plugin = copy(plugin)
    if isinstance(getattr(plugin, "scaler", None), HostGradScaler):
        plugin.scaler = copy(plugin.scaler)
    detach(plugin)
    return plugin


def host_precision(plugin: Any, lightning: Namespace) -> Any:
    """Return a precision plugin prepared for weights on the host.

    Raises:
        MisconfigurationException: If the plugin needs weights that stay on the device.
    """
    cls = type(plugin)
    builtin = cls.__module__.startswith(f"{lightning.name}.")
    # A user's plugin that does not convert modules can only change contexts and inputs. One that does (bitsandbytes,
    # Transformer Engine) inserts layers that keep their weights, or scales for them, on the device.
    harmless = not builtin and cls.convert_module is lightning.precision.convert_module
    lightning.check(
        cls is lightning.precision or isinstance(plugin, lightning.precisions) or harmless,
        f"`{cls.__name__}` does not work with `strategy='superpipeline'`: it expects weights that stay on the device, "
        "and they are in host memory. Choose one of `precision='32-true'`, '64-true', 'bf16-true', '16-true', "
        "'bf16-mixed' and '16-mixed'.",
    )
    if isinstance(plugin, lightning.mixed_precision) and plugin.scaler is not None:
        plugin.scaler = host_scaler(plugin.scaler, lightning)
    return plugin
