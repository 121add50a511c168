"""What becomes of what autograd saves of a unit's call: decided here, for each call, and nowhere else.

It is kept, or dropped and computed again (recompute.py), or it waits on the host (offload.py). `"auto"` chooses one of
the three for each unit (auto.py). The numbers are the same whatever is chosen.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.pipeline._private import in_backward
from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.activations.choice import Policy
from sp_lightning.pipeline.activations.recompute import CannotRunAgain, UnitCall
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.modules.tensors import tensors_in
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.weights.units import Member


class Activations:
    """Decides for each unit's call what becomes of what autograd saves.

    Args:
        policy: The user's choice.
        saved: The engine's saved-tensor hooks.
        device: Where is computed.
        stats: Counters.
        checks: Whether to make sure that what is computed again is the same.

    Attributes:
        chooses: Whether the choice is left to `auto`.
        auto: What chooses in the user's place. None if the user has chosen, or if there is nothing to choose by, and
            everything is kept.
        never_again: Members whose forward is not run again, because that has failed while the choice was ours.
        called: How often each member, by its name, was called in this step by a forward that builds a graph.
        backward_passes: How many have ended.
        when_backward_ends: Called then, too.
    """

    def __init__(
        self, policy: ActivationPolicy, saved: SavedTensors, device: torch.device, stats: Stats, checks: bool = False
    ) -> None:
        self.auto: AutoPolicy | None = None
        self.chooses = policy == "auto"
        self._policy: Policy = "keep" if policy == "auto" else policy
        self._saved = saved
        self._device = device
        self._stats = stats
        self._checks = checks
        self.never_again: set[str] = set()
        self.called: Counter[str] = Counter()
        self.backward_passes = 0
        self.when_backward_ends: Callable[[], None] = lambda: None
        self._dropped: weakref.WeakSet[UnitCall] = weakref.WeakSet()
        self._repeated: weakref.WeakSet[UnitCall] = weakref.WeakSet()
        self._inside = False
        self._told: set[str] = set()

    def recompute_from_now_on(self) -> bool:
        """Stop choosing, and take the least memory; False if that is so already."""
        if not self.chooses:
            return False
        self.chooses, self.auto, self._policy = False, None, "recompute"
        return True

    def begin_step(self) -> None:
        """A new graph is about to be built, and no other one waits for its backward."""
        self.called.clear()
        if self.auto is not None:
            self.auto.begin_step()

    def manages(self, member: Member) -> bool:
        """Whether `run` should make this call: it builds a graph, and nobody else decides what becomes of it.

        Inside of a unit's call that call decides; inside of a user's checkpoint, hooks of the checkpoint are on top.
        """
        return (
            (self.auto is not None or self._policy == "recompute")
            and member.is_streamed
            and not self._inside
            and torch.is_grad_enabled()
            and not in_backward()
            and self._saved.are_alone()
            and _has_its_own_weights(member)
        )

    @property
    def may_offload(self) -> bool:
        """Whether what any call saves may wait on the host."""
        return self.offloads or self.auto is not None

    @property
    def offloads(self) -> bool:
        """Whether what the call that is made now saves waits on the host."""
        return self._policy == "offload"

    def run(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit in the way that was chosen for it."""
        self.called[member.name] += 1
        self._inside = True
        try:
            if self.auto is None:
                return self._recompute(member, args, kwargs)[0]
            size = sum(tensor.nbytes for tensor in tensors_in((args, kwargs)))
            policy = self.auto.policy(member, size)
            if policy == "recompute":
                output, call = self._recompute(member, args, kwargs)
                self.auto.note(member, size, call.footprint)
                return output
            self._policy = policy
            return member.module(*args, **kwargs)
        finally:
            self._inside = False
            if self.auto is not None:
                self._policy = "keep"
                self.auto.end_call(member)

    def _recompute(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, UnitCall]:
        may_repeat = member.name not in self.never_again
        call = UnitCall(member, self._saved, self._device, args, kwargs, self._repeating, self._checks, may_repeat)
        with saved_tensors_hooks(call.pack, call.unpack):
            output = member.module(*args, **kwargs)
        obstacle = call.settle(output)
        if call.footprint.repeatable:
            self._dropped.add(call)
        if obstacle is not None and self.auto is None and member.name not in self._told:
            self._told.add(member.name)
            warnings.warn(
                f"`activations='recompute'`: {member.name!r} {obstacle}, so its forward cannot run a second time. What "
                "it saves for backward stays on the device.",
                stacklevel=2,
            )
        return output, call

    @contextmanager
    def _repeating(self, call: UnitCall) -> Iterator[None]:
        """Around a second forward."""
        self._stats.recomputed += 1
        self._repeated.add(call)
        if self.auto is None:
            yield
            return
        begin = self.auto.mark()
        try:
            yield
        except CannotRunAgain as error:
            # others that have lost their inputs in the same way: or each of them would fail in an attempt of its own
            changed = (other.member.name for other in self._dropped if other.has_changed)
            self.never_again.update(changed, [call.member.name])
            self.auto.measure_again()
            error.is_avoided = True
            raise
        self.auto.note_second_forward(call.member, begin, self.auto.mark())

    def begin_backward(self) -> None:
        """Backward has begun, at the end of the graph."""
        if self.auto is not None:
            self.auto.begin_backward()

    def reach(self, member: Member) -> None:
        """Backward has come to a unit."""
        if self.auto is not None:
            self.auto.reach(member)

    def end_backward(self) -> None:
        """Drop once more what a graph that is retained would hold on to."""
        for call in list(self._repeated):
            call.drop()
        self._repeated.clear()
        self.backward_passes += 1
        self.when_backward_ends()
        if self.auto is not None:
            self.auto.end_backward()


def _has_its_own_weights(member: Member) -> bool:
    """Whether nothing stands in for a weight, as it does under `functional_call`: it would be gone in backward."""
    return all(
        any(place.parameters.get(place.key) is own for own in (place.weight.master, place.weight.twin.parameter))
        for place in member.places
    )
