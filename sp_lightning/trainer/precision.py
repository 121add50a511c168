"""Precision plugins with weights on the host: which ones work, their loss scaler, how they clip and run backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sp_lightning.pipeline import Pipeline
from sp_lightning.trainer._namespace import Namespace
from sp_lightning.trainer.steps import Steps


class Loan:
    """The objects that a plugin may use while a module is attached. Pickling leaves them out.

    Attributes:
        pipeline: The engine.
        steps: Runs backward.
    """

    def __init__(self, pipeline: Pipeline | None = None, steps: Steps | None = None) -> None:
        self.pipeline = pipeline
        self.steps = steps

    def __getstate__(self) -> dict[str, Any]:
        return {"pipeline": None, "steps": None}


class HostGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose scale and growth tracker live in host memory.

    torch puts the scale on the device of the loss. Gradients are on the host here, so `unscale_` would copy the
    inverse scale and the overflow flag device -> host with `non_blocking=True`, which does not wait: the kernel could
    read them before they arrive. With the scale on the host there is no copy in that direction, and the step needs no
    device synchronization. The only copy is host -> device, in `scale`, from pageable memory: it is staged before the
    call returns, so that a later `update` cannot change what arrives.

    Args:
        settings: Those of `torch.amp.GradScaler`, except `device`.

    Attributes:
        loan: Gives access to the engine that has the gradients, while a module is attached.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("cpu", **settings)
        self.loan = Loan()

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # The engine tells overflow from the norms that came with the gradients, and unscales when they are read.
        pipeline = self.loan.pipeline
        overflow = None if pipeline is None else pipeline.optimizers.unscale(optimizer, inv_scale)
        if overflow is None:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            # For gradients on the device: `update` would copy the flag to the host without waiting, too.
            return {device: flag.cpu() for device, flag in found.items()}
        return {found_inf.device: torch.full_like(found_inf, float(overflow))}

    @override
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))


def host_scaler(scaler: torch.amp.GradScaler, lightning: Namespace) -> torch.amp.GradScaler:
    """Return a scaler with the settings and the state of `scaler` that works on host gradients.

    Args:
        scaler: The scaler of a `MixedPrecision` plugin: torch's own, or a user's subclass.
        lightning: The namespace of the exception.

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


def lend(plugin: Any, pipeline: Pipeline, steps: Steps, lightning: Namespace) -> None:
    """Have a plugin clip and unscale gradients through the engine, which does both when the optimizer reads them.

    The plugin's `backward` is redirected, too: of all that Lightning calls for backward, it is the innermost method
    that is not the user's, so that hooks and a strategy's own `backward` stay outside of what may have to run again.

    Args:
        plugin: A precision plugin. If a user's own class clips by itself, that is left alone.
        pipeline: The engine.
        steps: Runs backward.
        lightning: The namespace that the plugin belongs to.
    """
    loan = Loan(pipeline, steps)
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, HostGradScaler):
        scaler.loan = loan
    plugin.backward = partial(_backward, plugin, loan)
    for name, clip in _CLIPS.items():
        if getattr(type(plugin), name) is getattr(lightning.precision, name):
            setattr(plugin, name, partial(clip, plugin, loan))


def take_back(plugin: Any) -> None:
    """Undo `lend`: restore the plugin as the user built it."""
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, HostGradScaler):
        scaler.loan = Loan()
    for name in ("backward", *_CLIPS):
        vars(plugin).pop(name, None)


def _backward(plugin: Any, loan: Loan, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    run = partial(type(plugin).backward, plugin)
    if loan.steps is None:
        run(loss, *args, **kwargs)
    else:
        loan.steps.backward(run, loss, *args, **kwargs)


def _clip_by_norm(plugin: Any, loan: Loan, optimizer: Optimizer, clip_val: float) -> None:
    clip = nn.utils.clip_grad_norm_ if loan.pipeline is None else loan.pipeline.optimizers.clip_grad_norm
    clip(plugin.main_params(optimizer), clip_val)


def _clip_by_value(plugin: Any, loan: Loan, optimizer: Optimizer, clip_val: float) -> None:
    clip = nn.utils.clip_grad_value_ if loan.pipeline is None else loan.pipeline.optimizers.clip_grad_value
    clip(plugin.main_params(optimizer), clip_val)


_CLIPS = {"clip_grad_by_norm": _clip_by_norm, "clip_grad_by_value": _clip_by_value}


def host_precision(plugin: Any, lightning: Namespace) -> Any:
    """Return `plugin`, prepared for weights on the host.

    Args:
        plugin: A precision plugin.
        lightning: The namespace that the plugin belongs to.

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
