"""Which precision plugins work with weights on the host, and the loss scaler of `16-mixed`."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from sp_lightning._namespace import Namespace


class HostGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose scale and growth tracker live in host memory.

    torch puts the scale on the device of the loss. Gradients are on the host here, so `unscale_` would copy the
    inverse scale and the overflow flag device -> host with `non_blocking=True`, which does not wait: the kernel could
    read them before they arrive (hazard 14). With the scale on the host no copy in that direction is left, and the
    step needs no device synchronisation. The only copy is host -> device, in `scale`, from pageable memory: it is
    staged before the call returns, so that a later `update` cannot change what arrives.

    Args:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied with after `growth_interval` steps without overflow.
        backoff_factor: What the scale is multiplied with after a step with overflow.
        growth_interval: How many steps without overflow make the scale grow.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval)

    @override
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))


def host_scaler(scaler: torch.amp.GradScaler, lightning: Namespace) -> torch.amp.GradScaler:
    """Return a scaler with the settings and the state of `scaler` that works on host gradients.

    Args:
        scaler: The scaler of a `MixedPrecision` plugin: torch's own, or a user's subclass.
        lightning: Where the exception comes from.

    Raises:
        MisconfigurationException: The scaler is of a user's own class and made for another device than the CPU.
    """
    if isinstance(scaler, HostGradScaler) or not scaler.is_enabled():
        return scaler
    if type(scaler) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        host = HostGradScaler()
        host.load_state_dict(scaler.state_dict())
        return host
    lightning.check(
        scaler._device == "cpu",
        f"`MixedPrecision(scaler={type(scaler).__name__}(device={scaler._device!r}))` keeps its scale on the device,"
        " but `strategy='superpipeline'` keeps gradients in host memory. Build the scaler with `device='cpu'`, or"
        " derive it from `sp_lightning.precision.HostGradScaler`.",
    )
    if scaler._scale is None:  # torch would put the scale on the device of the first loss, whatever `device` says
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return scaler


def host_precision(plugin: Any, lightning: Namespace) -> Any:
    """Return `plugin` ready for host weights.

    Args:
        plugin: A precision plugin.
        lightning: The namespace that the plugin belongs to.

    Raises:
        MisconfigurationException: The plugin needs weights that stay on the device.
    """
    cls = type(plugin)
    builtin = cls.__module__.startswith(f"{lightning.name}.")
    # A user's plugin that leaves the modules as they are can only change contexts and inputs. One that converts
    # modules (bitsandbytes, Transformer Engine) puts layers in place that keep their weights, or scales of them, on
    # the device.
    harmless = not builtin and cls.convert_module is lightning.precision.convert_module
    lightning.check(
        cls is lightning.precision or isinstance(plugin, lightning.precisions) or harmless,
        f"`{cls.__name__}` does not work with `strategy='superpipeline'`: it expects weights that stay on the device,"
        " and they are in host memory. Choose one of `precision='32-true'`, '64-true', 'bf16-true', '16-true',"
        " 'bf16-mixed' and '16-mixed'.",
    )
    if isinstance(plugin, lightning.mixed_precision) and plugin.scaler is not None:
        plugin.scaler = host_scaler(plugin.scaler, lightning)
    return plugin
