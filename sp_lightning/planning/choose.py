"""The choice with the fastest step among those that fit the budgets of device and host (docs/planning.md).

A draft has the number of places that units stream through, a policy for activations, and the number of units that stay
on the device or visit it. The search fills a few hundred drafts up with as many units as fit, and the clock prices
them. Then it tries the cheapest one again, with a little more or less of everything.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Literal, NamedTuple, TypeAlias, get_args

from sp_lightning.pipeline.lanes.lanes import Lane
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.stats import readable_bytes
from sp_lightning.planning.clock import predict
from sp_lightning.planning.memory import (
    device_bytes,
    first_choice,
    first_host_bytes,
    gradient_bytes,
    host_bytes,
    landing_bytes,
    spread,
    weight_bytes,
    with_drive,
    with_waiting,
)
from sp_lightning.planning.work import Choice, Machine, Prediction, Workload

Staying: TypeAlias = Literal["first", "spread", "large"]
"""The units that stay on the device. With a drive, large ones are tried: their gradients take host memory, too."""

# the multiples of this number, without what is before the point, are spread evenly, however many there are
_GOLDEN = 0.618034

_PLACES = (1, 2, 3, 4)  # and as many as there are units
# the policies of units that do not keep their activations
_POLICIES: tuple[Policy, ...] = ("recompute", "offload")
# shares of the units that could keep their activations, and of those that could visit
_SHARES = (0.0, 1 / 3, 2 / 3, 1.0)
_CHANGES = (-3, -1, 1, 3)
_LATER = 4  # drafts that are tried after the first one that does not fit
# a host has bandwidth to spare for visits only if its memory gives more than its own steps take, by this factor
_SPARE_MEMORY = 1.3
# if steps take equally long, the one with less work wins: the busy time of its lanes counts by this part
_EFFORT = 0.002
# and that of a drive, which wears out, by this one
_WEAR = 0.02


@dataclass(eq=False)
class TooLittleMemory(ValueError):
    """Nothing fits, not even the smallest choice. The message names the largest part, and remedies for a run."""

    place: Literal["device", "host"]
    needed: int  # bytes that a step takes
    budget: int  # bytes that there are
    most: str  # the part that takes most
    hint: str = ""  # a remedy

    def __str__(self) -> str:
        memory = {"device": "GPU memory", "host": "CPU memory"}[self.place]
        needed, has = readable_bytes(self.needed), readable_bytes(self.budget)
        too_little = f"A step needs {needed} of {memory}, but only {has} are available."
        return f"{too_little} Most of it is for {self.most}{self.hint}."


class _Draft(NamedTuple):
    """A choice in numbers."""

    k: int
    policy: Policy  # of the units that do not keep their activations
    staying: Staying = "first"
    keeping: int = 0  # how many keep their activations, the last ones
    visits: float = 0.0  # the share of the other units that visits
    living: int = 0  # units that stay on the device, besides those that do so in any case


def choose(
    workload: Workload,
    machine: Machine,
    budget: int,
    *,
    host_budget: float = math.inf,
    k: int | Literal["auto"] = "auto",
    by_size: bool = False,
) -> Prediction:
    """Predict the fastest step within budgets of device and of host memory, with its choice.

    `k` may be fixed. With `by_size`, the choice moves as few bytes as possible, regardless of time, and no unit visits.
    If nothing fits, it raises `TooLittleMemory`.
    """
    units = max(1, len(workload.units))
    places = [*(each for each in _PLACES if each < units), units] if k == "auto" else [k]
    if workload.staying is None:
        workload = _with_first_steps(workload, budget, host_budget)
    search = _Search(workload, machine, budget, host_budget, by_size)
    search.look_at(search.drafts(places))
    if not search.found:
        raise search.too_little(places[0])
    # in the order in which they were found, which is the same in every process
    for kind in dict.fromkeys(draft[:2] for draft, _ in search.found.values()):
        best = None
        # until drafts near the best one do not help
        while (cheapest := search.cheapest(kind)[0]) != best:
            best = cheapest
            search.look_at(search.near(best))
    return search.cheapest()[1]


def _with_first_steps(workload: Workload, budget: int, host_budget: float) -> Workload:
    """Return the work with the units that stay on the device from the first step on; raise if the host is too small."""
    first = first_choice(workload, budget, host_budget)
    needed = first_host_bytes(workload, first)
    if needed > host_budget:
        waiting = landing_bytes(workload, Choice(1))
        sums = sum(unit.gradient_bytes for unit in workload.everything) if workload.adds_up else 0
        parts = {
            "weights and the optimizer's state": first_host_bytes(workload, first_choice(workload)) - waiting - sums,
            "gradients, which wait there for all others": waiting,
            "sums of gradients": sums,
        }
        most = max(parts, key=parts.__getitem__)
        raise TooLittleMemory("host", needed, int(host_budget), most)
    return replace(workload, staying=first.living)


@dataclass
class _Search:
    """Fills drafts up with as many units as fit, and prices them."""

    workload: Workload
    machine: Machine
    room: int  # bytes of the device
    host_room: float
    by_size: bool

    def __post_init__(self) -> None:
        workload, machine = self.workload, self.machine
        self.found: dict[Choice, tuple[_Draft, Prediction]] = {}
        self._choice = cache(self._make_choice)  # most drafts are met several times
        may_visit = machine.host_memory >= _SPARE_MEMORY * machine.host and not self.by_size
        self._able_to_visit = [n for n, unit in enumerate(workload.units) if unit.visit_up and may_visit]
        self._staying = workload.staying or ()
        self._able_to_live = [number for number in workload.able_to_live if number not in self._staying]
        self._ways = {policy: [unit.way(policy) for unit in workload.units] for policy in get_args(Policy)}

    def cheapest(self, kind: tuple[int, Policy] | None = None) -> tuple[_Draft, Prediction]:
        """Return the best draft, of all or of those with this number of places and this policy."""
        found = [each for each in self.found.values() if kind in (None, each[0][:2])]
        return min(found, key=lambda each: self._cost(each[1]))

    def _cost(self, prediction: Prediction) -> float:
        if self.by_size:
            repeating = sum(way.repeating > 0 for way in prediction.choice.ways)
            return prediction.bytes_to_device + prediction.bytes_to_host + repeating
        wear = _WEAR * prediction.lanes[Lane.TO_DRIVE]
        return prediction.seconds + _EFFORT * sum(prediction.lanes.values()) + wear

    def drafts(self, places: Sequence[int]) -> Iterator[_Draft]:
        """Yield drafts that are far from each other."""
        units = len(self.workload.units)
        staying = get_args(Staying)[: 3 if self.workload.has_drive else 2]
        for k, policy, which, keeping, visits in product(places, _POLICIES, staying, _SHARES, _SHARES):
            draft = _Draft(k, policy, which, round(keeping * units), visits)
            yield draft
            yield self._filled(draft)

    def near(self, draft: _Draft) -> Iterator[_Draft]:
        """Yield drafts with a little more or less of everything."""
        units = max(1, len(self.workload.units))
        for change in _CHANGES:
            living = draft._replace(living=max(0, draft.living + change))
            yield living
            if draft.visits and self.workload.has_drive:
                yield self._that_fits([living._replace(visits=count / units) for count in range(units + 1)])
            yield self._filled(draft._replace(keeping=min(units, max(0, draft.keeping + change))))
            visits = draft._replace(visits=min(1.0, max(0.0, draft.visits + change / units)))
            yield self._filled(visits)
            yield self._filled(visits._replace(keeping=0))  # activations may be in the way

    def _filled(self, draft: _Draft) -> _Draft:
        """Return the draft with as many units on the device as fit."""
        return self._that_fits([draft._replace(living=count) for count in range(len(self._able_to_live) + 1)])

    def _that_fits(self, drafts: Sequence[_Draft]) -> _Draft:
        """Return the last of these drafts that fits on the device, or the first one."""
        count = bisect_left(drafts, True, 1, key=lambda draft: not self._fits(draft))
        # one after them may take less again, as fewer gradients wait on the device
        later = filter(self._fits, drafts[count : count + _LATER])
        return [drafts[count - 1], *later][-1]

    def _fits(self, draft: _Draft) -> bool:
        return device_bytes(self.workload, self._choice(draft)) <= self.room

    def too_little(self, k: int) -> TooLittleMemory:
        """Return the error for the draft with this number of places that takes the least of the device."""
        work = self.workload
        drafts = [self._choice(_Draft(k, policy)) for policy in _POLICIES]
        fitting = [choice for choice in drafts if host_bytes(work, choice) <= self.host_room]
        least = min(fitting or drafts, key=partial(device_bytes, work))
        unit = max(work.units or work.everything, key=lambda unit: unit.weight_bytes)
        working = max((way.working for way in least.ways), default=0)
        parts = [
            (work.turn_bytes, "logits and the loss", ": `sp_lightning.loss_in_slices(model)` helps"),
            (working, "what one unit computes", ": smaller batches help (`accumulate_grad_batches`)"),
            (
                weight_bytes(work, least) + gradient_bytes(work, least),
                f"one unit, {unit.name!r}",
                ": a lower precision helps, or smaller `units`",
            ),
        ]
        _, most, hint = max(parts, key=lambda part: part[0])
        return TooLittleMemory("device", device_bytes(work, least), self.room, most, hint)

    def look_at(self, drafts: Iterable[_Draft]) -> None:
        """Price the drafts that fit."""
        for draft in drafts:
            choice = self._choice(draft)
            if choice in self.found or host_bytes(self.workload, choice) > self.host_room:
                continue
            if self._fits(draft):
                choices = [choice]
                # if its units visit in backward, later visits may be cheaper
                if choice.visiting and self.workload.stepping == "in backward":
                    choices.append(replace(choice, defers_visits=True))
                predictions = [predict(self.workload, self.machine, each) for each in choices]
                self.found[choice] = draft, min(predictions, key=self._cost)

    def _make_choice(self, draft: _Draft) -> Choice:
        able = self._able_to_live
        if draft.staying == "large":
            units = self.workload.everything
            able = sorted(able, key=lambda number: (-units[number].bytes_on_device, number * _GOLDEN % 1))
        count = min(len(able), draft.living)
        living = (*self._staying, *(spread(count, able) if draft.staying == "spread" else able[:count]))
        first = len(self.workload.units) - draft.keeping
        ways = (*self._ways[draft.policy][:first], *self._ways["keep"][first:])
        choice = Choice(draft.k, living, ways=ways)
        # which leave the host memory, so that fewer are on the drive
        for visits in (0.0, draft.visits, draft.visits):
            able = [number for number in self._able_to_visit if number not in (*living, *choice.on_drive)]
            choice = replace(choice, visiting=spread(round(visits * len(able)), able))
            choice = with_drive(self.workload, choice, self.host_room)
        return with_waiting(self.workload, choice, self.host_room)
