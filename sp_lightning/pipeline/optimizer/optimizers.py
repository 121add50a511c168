"""Steps of optimizers: units are updated while the device computes, with the numbers of a plain step.

The user's own optimizer stays the owner of all state and settings. The engine has to know only *when* it steps, and
torch's hooks on the steps of all optimizers tell that. Where weights can be stepped unit by unit (kinds.py tells),
torch's own code runs with a stand-in for the optimizer, whose `param_groups` have all other weights and nothing else;
the user's keep all of them, even after an error. Then ours are stepped unit by unit, on the thread of work.

[Note: when a unit is stepped]
*After backward*, by default: `step()` returns at once, and each unit is sent to the device when its update is done.
Everything that decides about a step (clipping, a loss scaler, a user's hook that looks at gradients) has run by then.
*In backward*, where a scope vouches that nothing of the kind will run (`EarlyStep`).
The next forward decides the order: its first unit among those that can be stepped comes first. So when backward ends,
the units whose gradients came last are stepped first, and those whose gradients came first may wait until after the
next forward has begun. A unit with a `.grad` of the user's, who may change it, is stepped before `step()` returns.

[Note: nobody sees an unfinished step]
Masters are guarded (guard.py) while a step is under way: code that accesses one waits for the step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.lanes.at_work import EngineAtWork, optimizer_steps, optimizer_waits
from sp_lightning.pipeline.optimizer.clipping import Clipping, EarlyStep
from sp_lightning.pipeline.optimizer.kinds import (
    Afterwards,
    OptimizerWeights,
    Step,
    identities_of,
    parameters_of,
    refuse_copies,
    why_not_by_unit,
)  # fmt: skip
from sp_lightning.pipeline.optimizer.staying import States, move_state
from sp_lightning.pipeline.optimizer.unit_steps import UnitSteps
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.torch_private import replace_wrapped, stand_in_for
from sp_lightning.pipeline.weights.weight import GradientLife, used_in_step


class Optimizers:
    """The services of a pipeline to the optimizers of its weights."""

    def __init__(self, at_work: EngineAtWork, processes: Processes | None, overlaps: bool | str) -> None:
        self._at_work = at_work
        self.clipping = Clipping(at_work)
        # The gradients of weights, by the identities of masters. Weights that stay on the device have none here.
        self._gradients: dict[int, Gradient] = {}
        self._processes = processes
        self._overlaps = overlaps
        # The optimizers that have stepped weights of the module, with the hooks that we put on them.
        self._known_optimizers: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()
        self.states = States(self._known_optimizers)
        self.steps_taken = 0  # number of steps of optimizers that have weights of the module
        # The fate of the gradients that the next optimizer step uses.
        self.afterwards = Afterwards.DROPPED
        # The weights of each optimizer.
        self._weights_by_optimizer: WeakKeyDictionary[Optimizer, OptimizerWeights] = WeakKeyDictionary()
        self._steps_by_unit = False  # whether units are stepped after the optimizer step under way
        # The step that began in backward, until its `step()` has been called.
        self._step_in_backward: EarlyStep | None = None

    def work_with(self, steps: UnitSteps, parameters: Collection[int]) -> None:
        """Work from now on with these steps and their gradients; `parameters` are identities of the module's."""
        self._steps = steps
        self._gradients = {id(weight.master): gradient for weight, gradient in steps.stream.gradient_of.items()}
        self._parameters = parameters
        self.clipping.work_with(steps, self._gradients)

    def have_weights_of(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer has any of the module's parameters."""
        return any(id(parameter) in self._parameters for parameter in parameters_of(optimizer))

    # ------------------------------------------------------------------------------------- around an optimizer's step

    def before_closure(self) -> None:
        """Suspect all weights before a closure: the optimizer may have written to them since its last call."""
        self._steps.window.suspect_all()

    def before_step(self, optimizer: Optimizer, stand_in: Optimizer | None) -> None:
        """Take weights that will be stepped unit by unit out of `stand_in`, which steps in place of the optimizer."""
        self._steps_by_unit = False
        if optimizer not in self._known_optimizers and not self._accept(optimizer):
            return
        with self._at_work:
            self._at_work.refuse_others()
            optimizer_weights = self._weights_of(optimizer)
            why_not = why_not_by_unit(optimizer)
            self._check_step(optimizer, optimizer_weights, why_not)
            window = self._steps.window
            window.write_back_all()  # the step reads masters
            if self._step_in_backward is not None:
                self._step_in_backward.check_promises(optimizer, optimizer_weights, why_not)
            if self._processes is not None:
                # Another process may write to masters. Units that were stepped in backward are sent after that.
                window.finish_copies(unit for unit in window.units if not unit.update.is_early_in_all_processes)
                self._processes.begin_optimizer_step(optimizer)
            if stand_in is not None:
                self._steps_by_unit = not self._is_follower
                groups = []
                # weights of other models may have been taken out before
                for group in stand_in.param_groups:
                    are_others = [identity not in self._gradients for identity in map(id, group["params"])]
                    groups.append({**group, "params": [*compress(group["params"], are_others)]})
                stand_in.param_groups = groups
            elif self._is_follower:
                self._leave_step_to_keeper(optimizer_weights)
            elif optimizer_weights.gradients:
                self._steps.settle()
                self._steps.stream.show_all()
                if any(unit.update.is_on_device for unit in optimizer_weights.units):
                    self._steps.visits.why_not = why_not or ""
            self._at_work.continuing_thread = get_ident()

    def _check_step(self, optimizer: Optimizer, optimizer_weights: OptimizerWeights, why_not: str | None) -> None:
        """Raise if a step is not possible now, or not as the user has asked for; `why_not` it is not unit by unit."""
        name = type(optimizer).__name__
        for unit in optimizer_weights.units:
            if unit.users:
                raise RuntimeError(
                    f"{name} steps weights of {unit.name!r} inside of a forward that computes with them. That "
                    "forward would continue with the old values. Step after it, for example in "
                    "`training_step`."
                )
        for gradient in optimizer_weights.gradients:
            weight = gradient.weight
            if weight.gradient_life is GradientLife.SPENT and not gradient.of_segment.is_consumed:
                raise used_in_step(weight.name, f"{name} steps it")
        if why_not is not None and self._overlaps is True:
            raise ValueError(
                f"`overlap_optimizer=True` is not possible, because {why_not}. Set it to 'auto' to let this "
                "optimizer step as in plain training."
            )
        self.check_drive(optimizer)

    def _leave_step_to_keeper(self, optimizer_weights: OptimizerWeights) -> None:
        """Take gradients away: another process steps the weights, and an optimizer skips those without a gradient."""
        self._steps.stream.consume(optimizer_weights.gradients)
        for gradient in optimizer_weights.gradients:
            weight = gradient.weight
            if weight.master.grad is not None:
                weight.gradient_life = GradientLife.SPENT
            weight.master.grad = None

    def after_step(self, optimizer: Optimizer) -> None:
        """Step the weights that were taken out of an optimizer, after it has stepped the others."""
        window = self._steps.window
        if optimizer not in self._known_optimizers:
            # Another optimizer may wrap this one, and copy the weights that it has stepped.
            window.suspect_all()
            return
        with self._at_work:
            self._at_work.continuing_thread = None
            optimizer_weights = self._weights_of(optimizer)
            if self._steps_by_unit:
                # Another optimizer may wrap this one, and its step has not ended yet.
                self._steps_by_unit = False
                self._step(optimizer, optimizer_weights)
            else:
                for unit in optimizer_weights.units:
                    window.note_write(unit)  # the optimizer may have kept aliases
                    self._steps.publish_step_without_gradients(unit, optimizer_weights)
            if self._step_in_backward is not None and self._step_in_backward.optimizer is optimizer:
                self._step_in_backward.acknowledge()
                self._step_in_backward = None
            if self.afterwards is not Afterwards.KEPT_UNTIL_ZEROED:
                for gradient in optimizer_weights.gradients:
                    if gradient.weight.gradient_life is GradientLife.OURS:
                        gradient.weight.gradient_life = GradientLife.USED
            if self._processes is not None:
                self._processes.look_at_copies(changed_alike=True)
            self._steps.visits.end_step()
            window.suspect_all()
            window.stats.optimizer_steps += 1
            self.steps_taken += 1

    def check_drive(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer's state cannot be on the drive, if there is one, or if an update there has failed."""
        drive = self._steps.drive
        if drive is not None and self.have_weights_of(optimizer):
            drive.check()
            drive.places.check(optimizer, self._steps.fused)

    def place_state(self, optimizer: Optimizer) -> None:
        """Have state on the drive as far as it belongs there: for a checkpoint to be loaded into it, or that was."""
        drive = self._steps.drive
        if drive is not None and not self._is_follower:
            with self._at_work:
                step = Step(optimizer, self._weights_of(optimizer), self._steps.fused)
                gradients = step.optimizer_weights.gradients
                coming = sum(gradient.weight.nbytes for gradient in gradients if gradient.tensor is None)
                for gradient in gradients:
                    state = optimizer.state.get(gradient.weight.master, {})
                    if drive.places.bring(step, {gradient: state}, coming):
                        optimizer.state[gradient.weight.master] = state

    @property
    def _is_follower(self) -> bool:
        """Whether another process of this machine steps the weights, for all of them."""
        return self._processes is not None and not self._processes.box.is_keeper

    def _accept(self, optimizer: Optimizer) -> bool:
        """Register an optimizer at its first step; tell whether it has any parameter of the module."""
        refuse_copies(optimizer)
        parameters = [parameter for parameter in parameters_of(optimizer) if id(parameter) in self._parameters]
        if not parameters:
            return False
        # It steps unit by unit from now on. Its steps have to end before its state is saved or loaded.
        self._known_optimizers[optimizer] = [
            optimizer.register_state_dict_pre_hook(self._finish_steps),
            optimizer.register_load_state_dict_pre_hook(self._finish_steps),
        ]
        # Parameters may have moved since the optimizer was made.
        move_state(optimizer, parameters)
        return True

    def _finish_steps(self, *_: object) -> None:
        with self._at_work:
            self._steps.settle_all()

    def _step(self, optimizer: Optimizer, optimizer_weights: OptimizerWeights) -> None:
        """Step the optimizer's weights unit by unit."""
        steps = self._steps
        step = Step(optimizer, optimizer_weights, steps.fused)
        step.collect_gradients(optimizer_weights.gradients)
        try:
            for unit in optimizer_weights.units:
                steps.step(unit, step)
        except BaseException:
            self.abandon()
            steps.window.backend.drain()
            steps.stream.abandon()  # nothing reads landing buffers any more
            warnings.warn(
                f"superpipeline: the step of {type(optimizer).__name__} has failed. Some weights may have "
                "taken it, and others not. Continue from a checkpoint.",
                stacklevel=2,
            )
            raise
        steps.finish(step.awaited if self._overlaps is not False else optimizer_weights.units)
        if [unit for unit in optimizer_weights.units if unit.update.pending_visit is not None]:
            steps.window.prefetch()  # this begins the first of these steps

    def _weights_of(self, optimizer: Optimizer) -> OptimizerWeights:
        optimizer_weights = self._weights_by_optimizer.get(optimizer)
        if optimizer_weights is None or optimizer_weights.parameters != identities_of(optimizer):
            self._steps.settle()  # steps of the earlier weights work on the same state
            optimizer_weights = OptimizerWeights(optimizer, self._gradients)
            self._weights_by_optimizer[optimizer] = optimizer_weights
        return optimizer_weights

    # ------------------------------------------------------------------------------------------------- in backward

    @contextmanager
    def stepping_in_backward(self, optimizer: Optimizer) -> Iterator[None]:
        """Step each unit in the backward pass of this scope as soon as its gradients have landed; they must be final.

        `optimizer.step()` must follow, with the settings that the optimizer has now. It steps the remaining weights. It
        is an error to read or change gradients in between.
        """
        early = None
        if self._step_in_backward is None:
            early = self._early_step(optimizer)
            self._step_in_backward = early
        self._steps.stream.early_step = early
        try:
            yield
        finally:
            self._steps.stream.early_step = None
        # After an exception the step is kept: other processes may have stepped some units.
        if early is not None and not early.stepped:
            self._step_in_backward = None

    def _early_step(self, optimizer: Optimizer) -> EarlyStep | None:
        """Return the step that may begin in backward; None if it may not."""
        processes = self._processes
        keeps_gradients = self.afterwards is not Afterwards.DROPPED
        if self._overlaps is False or why_not_by_unit(optimizer) is not None:
            return None
        if processes is not None and (keeps_gradients or not processes.averages or not processes.trains):
            return None
        with self._at_work:
            if optimizer not in self._known_optimizers:
                self._accept(optimizer)
            optimizer_weights = self._weights_of(optimizer)
            if any(weight.gradient_life is GradientLife.SPENT for weight in optimizer_weights.weights):
                return None  # its `step()` will raise an error
            return EarlyStep(optimizer, optimizer_weights, self._steps, keeps_gradients)

    def abandon(self) -> None:
        """Finish the steps that were given to the thread, and begin no other, after an exception."""
        # An error here was raised already, or is due to the exception.
        with contextlib.suppress(Exception):
            self._steps.settle()
        self._steps.stream.early_step = None
        early = self._step_in_backward
        self._step_in_backward = None
        if early is not None:
            early.abandon()

    def leave_weights(self) -> None:
        """Leave all steps to the optimizers' own code, until weights have their places."""
        self._weights_by_optimizer.clear()  # they would keep memory that is given up now
        self._gradients = {}
        self._step_in_backward = None

    def remove_hooks(self) -> None:
        """Remove all hooks from optimizers."""
        for hook in chain.from_iterable(self._known_optimizers.values()):
            hook.remove()


# -------------------------------------------------------------------------------- listeners to `step()` and clipping

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
