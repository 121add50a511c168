"""A step that may have to run again (retry.py): the state before it, and how to return to that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from sp_lightning.pipeline import Pipeline
from sp_lightning.pipeline._private import without_torch_function
from sp_lightning.pipeline.activations.effects import SideEffects
from sp_lightning.pipeline.activations.surroundings import RandomStates
from sp_lightning.trainer._namespace import Namespace

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_LARGEST = 1 << 28  # bytes: larger tensors are not copied; a queue of features is smaller, a data set is larger


class Attempt:
    """A step that may have to run again, and the state before it.

    Args:
        module: The user's module.
        pipeline: The engine.
        lightning: The namespace of Lightning in use.
        inputs: The step's inputs.
        run: Runs the step.
        size: Bytes of its inputs.

    Attributes:
        run: Runs the step.
        size: Bytes of its inputs.
    """

    def __init__(
        self,
        module: LightningModule,
        pipeline: Pipeline,
        lightning: Namespace,
        inputs: tuple[Any, ...],
        run: Callable[[], Any],
        size: int,
    ) -> None:
        self.run = run
        self.size = size
        self._record = pipeline.step_record
        self._record.begin()
        self._device = pipeline.device
        self._random = RandomStates(self._device)
        self._takes_its_batch = any(isinstance(value, Iterator) for value in inputs)
        trainer: Any = module.trainer
        param_groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        inputs = (*lightning.logged(module), *param_groups, *inputs)
        self._look = partial(
            SideEffects, module, inputs, outside=[module._trainer], largest=_LARGEST, trusts_versions=False
        )
        self._effects = self._look()
        self._registrations = _Registrations(module)
        self._hooks: SideEffects | None = None
        self._lost_to_hooks: str | None = None
        self._redo: Callable[[], None] | None = None

    def watch_hooks(self) -> None:
        """Look at the state once more: hooks between forward and backward run once, whatever runs again."""
        self._hooks = self._look()

    def note_hooks(self) -> None:
        """Note what such hooks have changed, as backward begins."""
        if self._hooks is None:
            return
        self._lost_to_hooks = self._hooks.conclude()
        changes, random = self._hooks.redo(), RandomStates(self._device)
        self._hooks = None

        def redo() -> None:
            changes()
            random.restore()

        self._redo = redo

    def redo_hooks(self) -> None:
        """Make the changes of such hooks again, after a forward that ran again."""
        if self._redo is not None:
            self._redo()

    def undo(self) -> str | None:
        """Restore the state before the attempt that failed, and prepare for the next one to fail, too.

        Returns:
            What it did that cannot be undone, for the message; None if everything was restored.
        """
        if self._takes_its_batch:
            return "takes its batch from an iterator"
        weights = self._record.weights
        weights.conclude()
        if weights.lost is not None:
            return f"writes to weight {weights.lost!r}, or takes its `.data`, and a write would happen twice"
        lost = self._lost_to_hooks or self._effects.conclude()
        if lost is None:
            self._effects.undo()
            self._registrations.undo()
            weights.undo()
            self._record.begin()
            self._effects = self._look()
            self._random.restore()
        return lost


class _Registrations:
    """What a step may turn on and off again at its end: gradients of weights (a GAN's toggles), and hooks on backward.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        with without_torch_function():
            self._trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
            self._hooks = [(owner, name, _copy(getattr(owner, name))) for owner, name in _owners_of_hooks(module)]

    def undo(self) -> None:
        """Return to what was registered before."""
        with without_torch_function():
            for parameter, requires_grad in self._trained:
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
            for owner, name, before in self._hooks:
                now = getattr(owner, name)
                if now is not None:
                    now.clear()
                    now.update(before or {})


def _owners_of_hooks(module: nn.Module) -> Iterator[tuple[object, str]]:
    for inner in module.modules():
        yield inner, "_backward_hooks"
        yield inner, "_backward_pre_hooks"
    for parameter in module.parameters():
        yield parameter, "_backward_hooks"
        yield parameter, "_post_accumulate_grad_hooks"


def _copy(hooks: dict[int, Any] | None) -> dict[int, Any] | None:
    return None if hooks is None else dict(hooks)
