"""Precision plugins with weights on the host: those that work, their loss scaler, how they clip and run backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from sp_lightning.pipeline.calls.guard import in_graphs
from sp_lightning.pipeline.optimizer.clipping import Clipping
from sp_lightning.trainer import FabricNamespace
from sp_lightning.trainer.narrator import out_of_memory_explained
from sp_lightning.trainer.steps import StepsMixin

if TYPE_CHECKING:
    from lightning.pytorch.plugins import Precision


class HasGradients(Protocol):
    """A strategy whose engine has gradients."""

    def clipping_of(self, optimizer: Optimizer) -> Clipping | None:
        """Return the object that unscales and clips the gradients of an optimizer; None if only torch has them."""


class HostGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose scale and growth tracker are in CPU memory, like gradients.

    torch puts them on the device of the loss. `unscale_` would then copy the inverse scale and the overflow flag to CPU
    memory with `non_blocking=True`, and might read them before they arrive. The copy to the GPU in `scale` is from
    pageable memory, and staged before the call returns: a later `update` cannot change what arrives.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("cpu", **settings)
        self.strategy: HasGradients | None = None

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # The engine tells overflow from the norms that came with the gradients, and unscales when they are read.
        clipping = None if self.strategy is None else self.strategy.clipping_of(optimizer)
        overflow = None if clipping is None else clipping.unscale(optimizer, inv_scale)
        if overflow is None:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            # For gradients on the device: `update` would copy the flag to the host without waiting, too.
            return {device: flag.cpu() for device, flag in found.items()}
        return {found_inf.device: torch.full_like(found_inf, float(overflow))}

    @override
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))


class PrecisionMixin(StepsMixin):
    """The part of the strategy that deals with its precision plugin, some of whose methods become the strategy's.

    The plugin's `backward` is the innermost method on the way into backward that is not a user's. Hooks, and a
    strategy's own `backward`, are around it, and so not part of the step. A user's own class that clips by itself is
    left alone.
    """

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = plugin
        if plugin is None:
            return
        host_precision(plugin, self.lightning, self)
        plugin.backward = self._backward
        if type(plugin).clip_grad_by_norm is self.lightning.precision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = self._clip_by_norm

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        pipeline = self.pipeline
        with ExitStack() as scopes:
            if pipeline is not None:
                scopes.enter_context(out_of_memory_explained(pipeline, trains=True))
                scopes.enter_context(pipeline.step(continues_last_step=True))
                scopes.enter_context(self.overlapping(pipeline))
                scopes.enter_context(pipeline.in_all_processes())
                if kwargs.get("inputs") is not None:  # the graph was built with others
                    kwargs["inputs"] = in_graphs(tree_leaves(kwargs["inputs"]))
            type(self.precision_plugin).backward(self.precision_plugin, loss, *args, **kwargs)

    def clipping_of(self, optimizer: Optimizer) -> Clipping | None:
        """Return the object that unscales and clips the gradients of an optimizer, while a module is attached."""
        return None if self.pipeline is None else self.pipeline.optimizers.clipping

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        plugin = self.precision_plugin
        clipping = self.clipping_of(optimizer)
        if clipping is None:
            type(plugin).clip_grad_by_norm(plugin, optimizer, clip_val)
        else:
            clipping.clip_grad_norm(plugin.main_params(optimizer), clip_val)


def host_precision(plugin: Any, lightning: FabricNamespace, strategy: HasGradients) -> None:
    """Refuse a precision plugin that needs weights on the device; have its scaler work on gradients on the host.

    The scaler unscales the gradients that the engine of the `strategy` has.
    """
    cls = type(plugin)
    # A plugin that does not convert modules can only change contexts and inputs. Others (bitsandbytes, Transformer
    # Engine) insert layers that keep their weights, or scales for them, on the device.
    converts = cls.convert_module is not lightning.precision.convert_module
    lightning.check(
        isinstance(plugin, lightning.converting_dtypes) or not converts,
        f"`{cls.__name__}` does not work with `strategy='superpipeline'`. It expects weights "
        "that stay on the GPU, but they are in CPU memory. Choose one of `precision='32-true'`, "
        "'64-true', 'bf16-true', '16-true', 'bf16-mixed' and '16-mixed'.",
    )
    scaler = plugin.scaler if isinstance(plugin, lightning.mixed_precision) else None
    if scaler is None:
        return
    if not isinstance(scaler, HostGradScaler):
        lightning.check(
            type(scaler) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler),
            f"`MixedPrecision(scaler={type(scaler).__name__}(...))` may keep its scale on the GPU, "
            "but `strategy='superpipeline'` keeps gradients in CPU memory. Derive the scaler from "
            "`sp_lightning.trainer.precision.HostGradScaler`.",
        )
        plugin.scaler = HostGradScaler(enabled=scaler.is_enabled())
        plugin.scaler.load_state_dict(scaler.state_dict())
    plugin.scaler.strategy = strategy


def autocast_of(plugin: Any, lightning: FabricNamespace) -> AbstractContextManager[Any]:
    """Return the scope in which a precision plugin computes forwards, if that changes the dtype that is sent."""
    is_mixed = isinstance(plugin, lightning.mixed_precision)
    scope: AbstractContextManager[Any] = plugin.forward_context() if is_mixed else nullcontext()
    return scope
