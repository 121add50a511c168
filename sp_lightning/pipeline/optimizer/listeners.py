"""The engine's listeners to `step()` of any optimizer, by torch's global hooks, and to `clip_grad_norm_`.

Where weights can be stepped unit by unit, torch's own `step()` runs with a *stand-in* for the optimizer, whose
`param_groups` a listener may change (optimizers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.lanes.at_work import optimizer_steps, optimizer_waits
from sp_lightning.pipeline.optimizer.kinds import why_not_by_unit
from sp_lightning.pipeline.optimizer.optimizers import Optimizers
from sp_lightning.pipeline.torch_private import replace_wrapped, stand_in_for

_listeners: list[Optimizers] = []
_handles: list[RemovableHandle] = []


def listen_to_optimizers(listener: Optimizers) -> None:
    """Notify `listener` of every optimizer step."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))
    _listeners.append(listener)


def stop_listening(listener: Optimizers) -> None:
    """Undo `listen_to_optimizers`."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        while _handles:
            _handles.pop().remove()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    optimizer_steps.depth += 1
    # Torch does not report a step that ends with an exception. So nothing is changed that would have to be undone.
    stand_in = stand_in_for(optimizer) if why_not_by_unit(optimizer) is None else None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    # There are gradients only when the closure has run.
    closure_then_tell = partial(_call_and_tell, optimizer, stand_in, closure)
    if closure is None:
        _tell(optimizer, stand_in)
    elif len(args) > 1:
        args = (args[0], closure_then_tell, *args[2:])
    else:
        kwargs = {**kwargs, "closure": closure_then_tell}
    return (stand_in or optimizer, *args[1:]), kwargs


def _call_and_tell(optimizer: Optimizer, stand_in: Optimizer | None, closure: Callable[[], Any]) -> Any:
    for listener in list(_listeners):
        listener.before_closure()
    with optimizer_waits():  # the closure may use weights outside of modules
        result = closure()
    _tell(optimizer, stand_in)
    return result


def _tell(optimizer: Optimizer, stand_in: Optimizer | None) -> None:
    if stand_in is not None:
        vars(stand_in).update(vars(optimizer))  # a closure may have changed it
    for listener in list(_listeners):
        listener.before_step(optimizer, stand_in)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    optimizer_steps.depth = max(0, optimizer_steps.depth - 1)
    for listener in reversed(_listeners):
        listener.after_step(optimizer)


def _clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
) -> Any:
    """Clip gradients as torch does; those of a model that streams are clipped when they are used, and not read here."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if norm_type == 2.0 and foreach is None:
        for listener in _listeners:
            total = listener.clipping.clip(listed, max_norm)
            if total is not None:
                return total
    # an exhausted generator gets torch's warning
    return _clip_by_torch(listed or parameters, max_norm, norm_type, error_if_nonfinite, foreach)


_clip_by_torch = replace_wrapped(nn.utils.clip_grad_norm_, _clip_grad_norm_)
