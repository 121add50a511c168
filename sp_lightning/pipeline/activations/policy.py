"""The one place that decides, for each call of a unit, what happens to the tensors that autograd saves.

They are kept, or dropped and recomputed (recompute.py), or offloaded to the host (offload.py), or recomputed from
inputs that were offloaded. `"auto"` chooses one of these for each unit (auto.py). The numbers are the same whatever is
chosen.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from sp_lightning.pipeline.activations.auto import AutoPolicy
from sp_lightning.pipeline.activations.effects import SideEffects
from sp_lightning.pipeline.activations.recompute import CannotRunAgain, UnitCall
from sp_lightning.pipeline.activations.saved import SavedTensors
from sp_lightning.pipeline.activations.ways import OFFLOADING, RECOMPUTING, Policy
from sp_lightning.pipeline.options import ActivationPolicy
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.torch_private import in_backward, unpacks_a_checkpoint
from sp_lightning.pipeline.units.tensors import tensor_bytes, tensors_in
from sp_lightning.pipeline.weights.units import Member


class Activations:
    """Decides, for each call of a unit, what happens to the tensors that autograd saves.

    Args:
        policy: The user's choice.
        saved: The engine's saved-tensor hooks.
        device: The device that forward and backward run on.
        stats: Counters.
        checks: Whether to verify that recomputed tensors equal those that were dropped.

    Attributes:
        chooses: Whether the choice is left to `auto`.
        auto: Chooses a policy for each unit; None if the user has chosen, or if there is no limit to choose by and
            everything is kept.
        never_again: Names of members that are no longer recomputed, because recomputing them failed under `"auto"`.
        backward_passes: How many backward passes have ended.
        units: Identities of the modules that are members of streamed units.
        on_backward_end: Called at the end of each backward pass.
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
        self.backward_passes = 0
        self.units: Set[int] = frozenset()
        self.on_backward_end: Callable[[], None] = lambda: None
        self._dropped: weakref.WeakSet[UnitCall] = weakref.WeakSet()
        self._repeated: weakref.WeakSet[UnitCall] = weakref.WeakSet()
        self._call: _CallUnderWay | None = None
        self._runs_again = False
        self._histories: defaultdict[str, _History] = defaultdict(_History)  # of members, by their names
        self._cast_before = WeakTensorKeyDictionary()  # inputs that autocast's cache may know

    def conclude_step(self) -> None:
        """Draw conclusions from the last step, while no graph waits for its backward."""
        if self.auto is not None:
            self.auto.conclude_step()

    def begin_step(self) -> None:
        """Begin a step that builds a new graph; the one before was concluded."""
        if self.auto is not None:
            self.auto.begin_step()

    def manages(self, member: Member) -> bool:
        """Tell whether `run` should make this call: it builds a graph, and nobody else decides about its saved tensors.

        Within a unit's call, the outermost call decides. Within a user's checkpoint, the checkpoint's hooks are on top.
        """
        return (
            (self.auto is not None or self._policy in RECOMPUTING)
            and member.is_streamed
            and self._call is None
            and torch.is_grad_enabled()
            and not in_backward()
            and self._saved.are_alone()
            and _has_its_own_weights(member)
        )

    @property
    def may_offload(self) -> bool:
        """Whether the activations of any call may be offloaded."""
        return self.offloads or self.auto is not None

    @property
    def offloads(self) -> bool:
        """Whether activations of the current call, all or its inputs, are offloaded."""
        policy = self._policy if self._call is None else self._call.policy
        return policy in OFFLOADING

    def pack_inputs(self) -> None:
        """Pack the inputs of the current call, which has been entered, if they are offloaded and it recomputes."""
        if self._call is not None and self._call.to_pack is not None:
            self._call.to_pack.pack_inputs()
            self._call.to_pack = None

    def run(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit under the policy that was chosen for it."""
        try:
            if self.auto is None:
                size, policy = 0, self._as_far_as_possible(member)
            else:
                inputs = tensors_in((args, kwargs))
                size = sum(map(tensor_bytes, inputs))
                policy = self.auto.policy(member, size, inputs)
            self._call = _CallUnderWay(policy)
            if policy not in RECOMPUTING:
                return member.module(*args, **kwargs)
            output, call = self._recompute(member, args, kwargs, self._call)
            if self.auto is not None:
                self.auto.note(member, size, call.footprint)
            return output
        finally:
            self._call = None
            if self.auto is not None:
                self.auto.end_call(member)

    def _as_far_as_possible(self, member: Member) -> Policy:
        """Return the user's policy; if inputs are to be offloaded, calls that cannot run again offload everything."""
        history = self._histories[member.name]
        if self._policy != "recompute_offload" or not history.held or history.is_time_to_look:
            return self._policy
        history.recorded += 1
        return "offload"

    def _recompute(
        self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any], under_way: _CallUnderWay
    ) -> tuple[Any, UnitCall]:
        history = self._histories[member.name]
        may_repeat = member.name not in self.never_again and not self._may_be_outdated(tensors_in((args, kwargs)))
        trusts_versions = None if history.is_time_to_look else history.trusts_versions
        history.recorded += 1
        effects = SideEffects(member.module, units=self.units, trusts_versions=trusts_versions)
        packs_later = self.offloads and may_repeat
        call = UnitCall(
            member,
            args,
            kwargs,
            saved=self._saved,
            device=self._device,
            on_repeat=self._repeating,
            effects=effects,
            checks=self._checks,
            may_repeat=may_repeat,
            packs_later=packs_later,
        )
        under_way.to_pack = call if packs_later else None
        with saved_tensors_hooks(call.pack, call.unpack):
            output = member.module(*args, **kwargs)
        obstacle = call.conclude(output)
        history.trusts_versions = bool(effects.trusts_versions)
        history.held = not call.footprint.repeatable
        if not history.held:
            self._dropped.add(call)
        if obstacle is not None and self.auto is None and not history.warned:
            history.warned = True
            warnings.warn(
                f"`activations={under_way.policy!r}`: {member.name!r} {obstacle}, so its forward cannot run a "
                "second time. What it saves for backward stays on the device.",
                stacklevel=2,
            )
        return output, call

    def _may_be_outdated(self, inputs: Sequence[Tensor]) -> bool:
        """Tell whether autocast's cache may hold a cast of what an input was before it was changed.

        A search for inputs (`x.data.sub_(x.grad)`) goes on computing with that cast, which a second forward would not
        find. Autocast keeps casts of leaves that require a gradient, until its region ends.
        """
        if not (torch.is_autocast_enabled(self._device.type) and torch.is_autocast_cache_enabled()):
            return False
        leaves = [x for x in inputs if x.is_leaf and x.requires_grad and not isinstance(x, nn.Parameter)]
        again = any(leaf in self._cast_before for leaf in leaves)
        self._cast_before.update(dict.fromkeys(leaves))
        return again

    @contextmanager
    def _repeating(self, call: UnitCall) -> Iterator[None]:
        """Surround a second forward: count it, time it for `auto`, and note its member if it fails."""
        self._stats.recomputed += 1
        self._repeated.add(call)
        ran_again, self._runs_again = self._runs_again, True
        begin = None if self.auto is None else self.auto.mark()
        try:
            yield
        except CannotRunAgain:
            if self.auto is None:
                raise
            # and those whose inputs have changed as well, for whoever catches the error and goes on
            changed = (other.member.name for other in self._dropped if other.has_changed)
            self.never_again.update(changed, [call.member.name])
            self.auto.measure_again()
            raise
        finally:
            self._runs_again = ran_again
        if self.auto is not None:
            self.auto.note_second_forward(call.member, begin, self.auto.mark())

    def runs_again(self) -> bool:
        """Tell whether a forward runs again in backward only for what it saves: ours, or that of a checkpoint."""
        return self._runs_again or (not self._saved.are_alone() and unpacks_a_checkpoint())

    def begin_backward(self) -> None:
        """Note that backward has begun, at the end of the graph."""
        if self.auto is not None:
            self.auto.begin_backward()

    def reach(self, member: Member) -> None:
        """Note that backward has reached a unit."""
        if self.auto is not None:
            self.auto.reach(member)

    def end_backward(self) -> None:
        """Drop what was recomputed, which a retained graph would otherwise hold."""
        for call in list(self._repeated):
            call.drop()
        self._repeated.clear()
        self.backward_passes += 1
        self.on_backward_end()
        if self.auto is not None:
            self.auto.end_backward()

    def let_go(self) -> None:
        """Refer to the module no longer: its graphs, which may live on, cannot recompute anything now."""
        for call in list(self._dropped):
            call.let_go()


@dataclass
class _CallUnderWay:
    """The outermost call of a unit that is under way.

    Attributes:
        policy: What happens to what it saves.
        to_pack: Has inputs that are packed once the unit is entered; None if there are none.
    """

    policy: Policy
    to_pack: UnitCall | None = None


@dataclass
class _History:
    """What earlier calls of a member that were recorded, to run again, have shown.

    Attributes:
        recorded: How many there were.
        held: Whether the last one held what it had saved, as it cannot run again.
        trusts_versions: Whether changes in place were all counted (see effects.py); None if nobody has looked.
        warned: Whether a warning has said why calls cannot run again.
    """

    recorded: int = 0
    held: bool = False
    trusts_versions: bool | None = None
    warned: bool = False

    @property
    def is_time_to_look(self) -> bool:
        """Whether to look for effects again: in the first call, the second, the fourth, ..."""
        return (self.recorded + 1).bit_count() == 1


def _has_its_own_weights(member: Member) -> bool:
    """Tell whether no weight is replaced, as by `functional_call`: the replacement would be gone in backward."""
    return all(entry.is_in_place for entry in member.entries)
