"""Calls under autocast: how a forward uses its weights decides which dtype they are sent in from then on.

The rules are in lowering.py; this module applies them to the calls of an arrangement.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sp_lightning.pipeline.lasting import Lasting
from sp_lightning.pipeline.layout.arrangement import Arrangement
from sp_lightning.pipeline.outside import OutsideUse
from sp_lightning.pipeline.torch_private import in_backward
from sp_lightning.pipeline.weights.compiled import run_uncompiled
from sp_lightning.pipeline.weights.lowered import ALL_ELEMENTS, begin_call
from sp_lightning.pipeline.weights.lowering import LoweringSpy
from sp_lightning.pipeline.weights.units import Member
from sp_lightning.pipeline.weights.weight import Weight


class UnderAutocast:
    """Watches the calls of an arrangement's members until it is known how autocast treats their weights.

    Args:
        arrangement: The arrangement.
        lasting: The parts that outlive it.
        outside: Makes weights resident that must not be sent lowered.
    """

    def __init__(self, arrangement: Arrangement, lasting: Lasting, outside: OutsideUse) -> None:
        self._arrangement = arrangement
        self._device_type = lasting.device.type
        self._learned = lasting.learned
        self._graphs = lasting.graphs
        self._outside = outside
        self._region = _Region(lasting.device)

    def needs_watching(self, member: Member) -> bool:
        """Tell whether a call would show something new: it is the first one with a graph, or the first one without."""
        return torch.is_grad_enabled() not in member.observed

    def run_watched(
        self, member: Member, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a member's forward and note how it uses its weights."""

        def keep_as_is(layer: nn.Module) -> None:
            for entry in member.entries:
                if entry.parameters is layer._parameters and entry.weight.lowered:
                    self._outside.keep_as_is(entry.weight)
                    entry.current = self._outside.serve(entry.weight)

        spy = LoweringSpy(self._arrangement.twins, self._device_type, keep_as_is)
        with spy:  # it does not see into compiled code
            output = run_uncompiled(forward, *args, **kwargs)
        member.observed.add(spy.builds_graph)
        if spy.builds_graph:
            self._graphs.current.uncompiled.add(member)
        self._learned.note_uses_under_autocast(spy.lowered, spy.used_as_is)
        return output

    def begin_call(self, member: Member) -> None:
        """Begin a call; send a weight in its own dtype if one graph uses it twice, and autocast casts it twice.

        It does so in each `with torch.autocast(...)` of its own, and without its cache for each use. The gradients of
        these casts add up in fp32.
        """
        if self._arrangement.autocast is None or not torch.is_grad_enabled():
            return
        for entry in member.entries:
            if not entry.weight.twin.group.users:
                begin_call(entry.weight.twin)
        has_cache = torch.is_autocast_cache_enabled()
        if not in_backward():
            region = self._region.current() if has_cache else None
            number = self._graphs.current.number
            for weight in _begins_to_use(member):
                if weight.last_graph == number and (region is None or weight.last_region != region):
                    self._outside.keep_as_is(weight)
                weight.last_graph, weight.last_region = number, region
        elif not has_cache:
            for weight in _begins_to_use(member):
                casts = self._outside.casts_in_new_graph(weight)
                if casts:
                    self._outside.keep_as_is(weight)
                elif casts is not None:
                    casts.append(ALL_ELEMENTS)


def _begins_to_use(member: Member) -> list[Weight]:
    """Return the weights that a call computes with and that gradients may reach, but for those of calls around it."""
    members = [] if member.unit is None else member.unit.members
    in_use = {entry.weight for other in members if other.running_calls for entry in other.entries}
    used = [entry.weight for entry in member.entries if entry.is_in_place and entry.weight.master.requires_grad]
    return [weight for weight in dict.fromkeys(used) if weight not in in_use]


class _Region:
    """Tells one outermost `with torch.autocast(...)` from the next: at the end of each, autocast empties its cache.

    A cast of a tensor of ours is put into that cache, and an object into the metadata of the cast's node: it is gone
    when the cast is. Nothing is saved for backward, so no hooks of others see this.

    Args:
        device: The device whose tensors autocast casts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark: weakref.ref[_Mark] | None = None
        self._number = 0

    def current(self) -> int:
        """Return a number for the region that this is called in, which builds a graph and has a cache."""
        if self._mark is None or self._mark() is None:
            factor = torch.zeros(1, 1, device=self._device)
            result: Any = torch.addmm(nn.Parameter(factor), factor, factor)
            cast, mark = result.grad_fn.next_functions[0][0], _Mark()
            cast.metadata[mark] = mark
            self._mark = weakref.ref(mark)
            self._number += 1
        return self._number


class _Mark:
    """Lives as long as the node of a cast."""


def without_autocast_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Have a forward that builds no graph cast weights for each use: the cache would keep those of all units."""

    def uncached(*args: Any, **kwargs: Any) -> Any:
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(True)

    return uncached
