"""Steps: the scope of each, and the calls of modules within it.

[Note: one step]
`step()` opens a scope in which masters are guarded, and weights on the device are checked against them before use. A
call *enters* its unit (the group is brought to the device, twins take the masters' place in the module tree) and
*leaves* it (masters are put back, the slot may be reused). Backward *reaches* units through the nodes that made their
outputs, through the saved tensors that it unpacks, and through recomputation; it leaves all of them when it ends. Each
time, the order of uses tells what comes next, and copies are started for it.

    order -> window -> lanes -> device -> autograd -> gradients -> optimizer -> host
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from sp_lightning.pipeline.arranger import Arranger, Planner
from sp_lightning.pipeline.debug import AccessCheck
from sp_lightning.pipeline.engine import Engine
from sp_lightning.pipeline.torch_private import in_backward, in_transform, is_capturing
from sp_lightning.pipeline.weights.guard import optimizer_steps, optimizer_waits
from sp_lightning.pipeline.weights.units import Member


class StepScopes:
    """Opens and closes steps, and routes calls of modules into them. Between steps, units may be arranged anew.

    Raises:
        ValueError: If an option does not fit the module or the available memory.
    """

    def __init__(self, engine: Engine, planner: Planner | None) -> None:
        self._engine = engine
        self._at_work, self._graphs = engine.at_work, engine.graphs
        engine.keeper = self
        self.arranger = Arranger(engine, planner)  # keeps an arrangement of the units at work

    def abandon(self) -> None:
        """Recover from an exception in the middle of a step: nothing is in flight, and the next step can begin."""
        with self._at_work:
            self._engine.stats.resets += 1
            self._engine.abandon()
            self.arranger.stop_planning()
            self._graphs.scopes = 0
            self._graphs.begin()
            optimizer_steps.depth = 0
            self._engine.relax_guard()

    @contextmanager
    def scope(self, look_for_new_parameters: bool = False, goes_on: bool = False) -> Iterator[None]:
        """Open a scope, which begins a step if it is not within another.

        Args:
            look_for_new_parameters: Whether to check for other Parameters in the modules.
            goes_on: Whether it is for a backward pass of the last step.
        """
        if self._graphs.scopes == 0:
            self._open(look_for_new_parameters, goes_on)
        pushed = self._engine.saved.push(ahead=True)
        self._graphs.scopes += 1
        try:
            with self._checked():
                yield
        except BaseException as error:
            if self._graphs.scopes == 1 and not in_backward():
                self.abandon()
            if isinstance(error, RuntimeError) and str(error).startswith("torch.func.") and error.__cause__ is None:
                raise RuntimeError(
                    f"{error}\nsuperpipeline has such hooks in a step. Use `torch.autograd.grad`, if need be with "
                    "`create_graph=True`."
                ) from error
            raise
        finally:
            if pushed:
                self._engine.saved.pop()
            if self._graphs.scopes:
                self._graphs.scopes -= 1
                if self._graphs.scopes == 0 and not in_backward():
                    with self._at_work:
                        self._engine.window.end_step()
                    self._graphs.begin()  # whoever still holds the old graph waits for its backward
                self._engine.relax_guard()

    def _checked(self) -> AbstractContextManager[Any]:
        # Not in inference: torch's fused fast paths are off under a dispatch mode, and other kernels round differently.
        if self._engine.options.debug and self._graphs.scopes == 1 and torch.is_grad_enabled():
            return AccessCheck(self._engine)
        return nullcontext()

    def _recover(self) -> None:
        if self._engine.backward.running or any(member.running_calls for member in self._engine.arrangement.members):
            self.abandon()  # a backward outside of any scope ended with an exception

    def _open(self, look_for_new_parameters: bool, goes_on: bool) -> None:
        optimizer_steps.depth = 0
        if in_backward():
            self._engine.backward.note()
            return
        self._recover()
        goes_on = goes_on or self._graphs.waiting()  # this is the backward of the previous step
        self.arranger.before_step(look_for_new_parameters, goes_on)
        if not goes_on:
            self._engine.optimizers.begin_step()
            self._engine.stats.steps += 1
            self._engine.backend.trace.begin_step()
            self._engine.activations.begin_step()
            self._engine.order.begin_step()
            if torch.is_grad_enabled():
                with self._at_work:
                    self._engine.stream.reserve()
        self._engine.arrangement.unused_in_step = not goes_on
        self._engine.arm_guard()
        with self._at_work:
            self._engine.window.begin_step()

    # ------------------------------------------------------------------------------------------- calls of modules

    def call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of a member's module with its weights on the device (see gates.py)."""
        if is_capturing():
            raise RuntimeError(
                "A module that superpipeline streams cannot be captured as a graph (by `torch.jit.trace`, "
                "`torch.export`, `torch.onnx.export`, `torch.fx`): the graph would keep the weights of one moment. "
                "Capture `copy.deepcopy(module).cpu()`, which is plain, or capture before or after the run."
            )
        if in_transform() and (member.is_streamed or self._graphs.scopes == 0):
            raise RuntimeError(
                f"{member.name or 'the model'!r}, whose weights are streamed, is called within a transform of "
                "`torch.func`. Name the modules that it calls in `resident=`, within a step. To differentiate, use "
                "`torch.autograd.grad`."
            )
        if optimizer_steps.depth:
            with optimizer_waits():
                return self.call(member, forward, args, kwargs)
        return self._call(member, forward, args, kwargs)

    def _call(self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._graphs.scopes == 0:
            arrangement = self._engine.arrangement
            with self.scope():
                if self._engine.arrangement is not arrangement:
                    return member.module(*args, **kwargs)  # as a member of the new arrangement
                return self._call(member, forward, args, kwargs)
        if member.compiled is not None and member.module._compiled_call_impl is None:
            forward = member.compiled
        autocast = self._autocast_dtype()
        if (
            member.unit is not None
            and autocast != self._engine.arrangement.autocast
            and self.arranger.adapt_to_autocast(member, autocast)
        ):
            return member.module(*args, **kwargs)  # as a member of the new arrangement
        return self._engine.calls.run(member, forward, args, kwargs, autocast)

    def _autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype that autocast lowers weights to, so that they can be sent in it; None if autocast is off."""
        if not torch.is_autocast_enabled(self._engine.device.type):
            return None
        return torch.get_autocast_dtype(self._engine.device.type)
