"""The device and host memory that a step takes with a given choice, and the ways that activations can go.

[Note: the peak]
From its forward to its backward a unit holds something: all of its saved tensors, or its inputs alone, or next to
nothing if these wait on the host. While it computes, in forward and in backward, it takes more. Meanwhile the units
before it hold theirs, and those after it hold nothing yet, or nothing any more. The tensors of the unit right before it
may still be leaving for the host, or be coming back already. So each unit needs three amounts: the bytes that the units
before it hold, the bytes of the last of them that are under way, and its own bytes as it computes. The peak is the
largest of these sums. At the turn from forward to backward it may be higher: all units hold their tensors, and a loss
takes more. Gradients of units that visit stay from their backward until they are updated, in the next forward: while a
unit computes, its own and those of units after it are there. So do gradients that wait on the device because the host
has no room; sums of several micro-batches are there all the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from torch import nn
from torch.optim import Adadelta, Adagrad, Optimizer, Rprop

from sp_lightning.optim.on_device import bytes_of_step
from sp_lightning.pipeline.activations.offload import Footprint
from sp_lightning.pipeline.gradients.gradient_memory import landing_buffers, three_buffers
from sp_lightning.pipeline.optimizer.kinds import OURS
from sp_lightning.pipeline.optimizer.state_file import without_room
from sp_lightning.pipeline.optimizer.state_ring import BUFFER, BUFFERS
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.placing.places import place_in_arena
from sp_lightning.planning.work import Choice, Numbers, UnitWork, Way, Workload

RING = BUFFERS * BUFFER
"""Bytes of host memory through which optimizer state on a drive passes."""

_TAKE_TWICE = (Adadelta, Adagrad, Rprop)


def device_bytes(workload: Workload, choice: Choice) -> int:
    """Return the peak device memory of weights, gradients and activations."""
    return weight_bytes(workload, choice) + gradient_bytes(workload, choice) + activation_bytes(workload, choice)


def weight_bytes(workload: Workload, choice: Choice) -> int:
    """Return the device memory for weights, for all else of units that stay there, and for the pieces of visits."""
    streamed = [unit.weight_bytes for unit in workload.kept_on_host(choice).values()]
    resident = 0 if len(workload.units) in choice.living else streamed.pop()
    pieces = max((unit.visit_bytes for unit in workload.numbered(choice.visiting)), default=0)
    living_bytes = bytes_that_stay(workload.numbered(choice.living))
    return _arena_bytes(tuple(streamed), choice.k) + resident + living_bytes + pieces


def bytes_that_stay(living: Sequence[UnitWork]) -> int:
    """Return the device memory for units that stay there, and for a piece of one of them while it is updated."""
    return sum(unit.bytes_on_device for unit in living) + max((unit.piece_bytes for unit in living), default=0)


def gradient_bytes(workload: Workload, choice: Choice) -> int:
    """Return the device memory for gradients on their way to the host, or for the norms of those that wait."""
    return workload.staging_buffers * max(workload.gradients_to_host(replace(choice, waiting=())))


def landing_bytes(workload: Workload, choice: Choice) -> int:
    """Return the host memory for gradients: for few if they are used or added as they come, else for all."""
    gradients = sorted(workload.gradients_to_host(choice), reverse=True)
    pass_through = workload.stepping == "in backward" or workload.adds_up
    if choice.waiting:  # if the other gradients pass through buffers, they share these
        few = sum(three_buffers(map(workload.bytes_that_wait, workload.kept_on_host(choice))))
        return few + (0 if pass_through else sum(gradients))
    if pass_through:
        gradients = gradients[: landing_buffers(len(gradients))]
    return sum(gradients)


def host_bytes(workload: Workload, choice: Choice) -> int:
    """Return the host memory for weights, gradients, optimizer state, and activations that wait there."""
    units = workload.kept_on_host(choice)
    on_host = sum(unit.host_bytes for unit in units.values())
    if choice.on_drive:
        on_host += RING - state_bytes(workload, choice.on_drive)
    if workload.adds_up:
        on_host += sum(units[number].sum_bytes for number in units.keys() - set(choice.waiting))
    return on_host + landing_bytes(workload, choice) + sum(way.leaving for way in workload.ways(choice))


def state_bytes(workload: Workload, numbers: Iterable[int]) -> int:
    """Return the bytes of optimizer state of units with these numbers."""
    return sum(unit.state_bytes for unit in workload.numbered(numbers))


def with_drive(workload: Workload, choice: Choice, host_room: float) -> Choice:
    """Return the choice in which only optimizer state that the host has no room for is on the drive."""
    choice = replace(choice, on_drive=())
    excess = host_bytes(workload, choice) - host_room
    if not workload.has_drive or excess <= 0:
        return choice
    units = workload.kept_on_host(choice)
    # the resident one comes first
    able = sorted(units.keys() - choice.visiting, key=lambda number: (number + 1) % len(workload.everything))
    sizes = {number: units[number].state_bytes for number in able}
    return replace(choice, on_drive=tuple(without_room(sizes, sum(sizes.values()) - RING - excess)))


def spread(count: int, numbers: Sequence[int]) -> Numbers:
    """Return `count` of these numbers, spread evenly."""
    return tuple(numbers[(2 * place + 1) * len(numbers) // (2 * count)] for place in range(count))


def first_choice(workload: Workload, device_room: float = 0.0, host_room: float = math.inf) -> Choice:
    """Return the choice for the steps before there is a plan: everything streams if the host has room for it.

    Otherwise a drive takes state, and as many gradients wait on the device as there is room for. If that is not enough,
    as few units stay there as the host requires, or as many as there is room for.
    """
    units = workload.units
    first = Choice(min(2, max(1, len(units))), ways=tuple(unit.way("recompute") for unit in units))
    first = with_drive(workload, first, host_room)
    able_to_live = workload.able_to_live if workload.may_stay else ()
    for count in range(len(able_to_live) + 1):
        if first_host_bytes(workload, first) <= host_room:
            break
        next_one = replace(first, living=able_to_live[:count], waiting=(), on_drive=())
        if count and device_bytes(workload, next_one) > device_room:
            break
        # the most gradients wait on the device that there is room for, if the host gains by it
        choices = _with_more_waiting(workload, next_one)
        most = bisect_right(choices, device_room, lo=1, key=partial(device_bytes, workload))
        next_one = min(next_one, choices[most - 1], key=partial(host_bytes, workload))
        first = with_drive(workload, next_one, host_room)
    return first


def first_host_bytes(workload: Workload, first: Choice) -> int:
    """Return the host memory that the first steps take (see `first_choice`), or the end of training, if that is more.

    At the end all weights are there again. Optimizer state for which there is no room stays where it is.
    """
    elsewhere = state_bytes(workload, (*first.living, *first.on_drive))
    afterwards = sum(unit.host_bytes for unit in workload.everything) - elsewhere
    return max(host_bytes(workload, first), afterwards)


def with_waiting(workload: Workload, choice: Choice, host_room: float) -> Choice:
    """Return the choice in which only gradients that the host has no room for wait on the device."""
    if host_bytes(workload, choice) <= host_room:
        return choice
    choices = _with_more_waiting(workload, choice)
    least = bisect_left(choices, True, key=lambda each: host_bytes(workload, each) <= host_room)
    return choices[min(least, len(choices) - 1)]


def _with_more_waiting(workload: Workload, choice: Choice) -> list[Choice]:
    """Return the choice, then with more and more gradients waiting, first those that wait for the shortest time."""
    passing = workload.micro_steps == 1 and workload.stepping != "after backward"
    if passing or not workload.may_wait:
        return [choice]
    able = [number for number, nbytes in enumerate(workload.gradients_to_host(choice)) if nbytes]
    return [replace(choice, waiting=tuple(able[:count])) for count in range(len(able) + 1)]


def peak(ways: Sequence[Way], turn: int = 0, staying: Sequence[int] = ()) -> int:
    """Return the most bytes that are on the device at once, with `turn` bytes at the turn; see [Note: the peak].

    `staying` has the bytes of each unit's gradients that stay.
    """
    held = most = under_way = 0
    gradients = sum(staying)
    for number, way in enumerate(ways):
        most = max(most, held + under_way + way.working + gradients)
        held += way.held
        under_way = way.under_way
        if staying:
            gradients -= staying[number]
    return max(most, held + under_way + turn)


def activation_bytes(workload: Workload, choice: Choice) -> int:
    """Return the peak device memory for saved tensors, gradients that stay, the computing of units, and the turn."""
    always = workload.outside_bytes
    if not workload.trains:
        return always
    staying: list[int] = []
    if workload.gradients_stay:
        stay = {*choice.visiting, *choice.waiting}
        units = enumerate(workload.everything)
        *staying, of_resident = [unit.gradient_bytes * (number in stay) for number, unit in units]
        always += of_resident
    else:  # sums
        always += sum(map(workload.bytes_that_wait, choice.waiting))
    return peak(workload.ways(choice), workload.turn_bytes, staying) + always


@lru_cache(maxsize=4096)  # the same window is tried with many ways for activations
def _arena_bytes(sizes: tuple[int, ...], slots: int) -> int:
    return place_in_arena(sizes, slots)[1]


def bytes_meanwhile(optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return the bytes of an accelerator that a step of parameters takes there meanwhile: in all, and for a piece.

    Torch's own code takes the bytes of the weights that it steps at once, or twice as many. Fused code, and code
    that steps weights one by one, takes none. Our optimizers step one piece of them after the other.
    """
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    nbytes = in_pieces = 0
    for optimizer in optimizers:
        times = 2 if isinstance(optimizer, _TAKE_TWICE) else 1
        for group in optimizer.param_groups:
            stepped = [parameter for parameter in group["params"] if id(parameter) in trained]
            if type(optimizer) in OURS:
                in_pieces += sum(parameter.numel() for parameter in stepped)
            elif group.get("foreach", False) is not False and not group.get("fused"):
                nbytes += times * sum(parameter.nbytes for parameter in stepped)
    return nbytes, bytes_of_step(in_pieces)


def ways_of(
    calls: Sequence[Footprint], second_forward: float, policies: Sequence[Policy], inputs_stay: bool = False
) -> tuple[Way, ...]:
    """Return the ways of a unit's activations, by preference: one policy for all members that can follow it.

    `second_forward` is the time of its second forward, in seconds. With `inputs_stay`, the inputs of the first member
    are the batch, which the caller of the step holds.
    """
    ways: dict[tuple[int, int], Way] = {}
    for policy in policies:
        members = [_way_of(call, policy, inputs_stay and call is calls[0]) for call in calls]
        held = sum(way.held for way in members)
        leaving = sum(way.leaving for way in members)
        repeats = any(way.policy == "recompute" for way in members)
        way = Way(
            policy,
            held,
            peak(members),
            leaving,
            under_way=members[-1].under_way,
            repeating=second_forward if repeats else 0.0,
        )
        ways.setdefault((held, leaving), way)
    return tuple(ways.values())


def _way_of(call: Footprint, policy: Policy, inputs_stay: bool) -> Way:
    """Return the way of a member's activations; one that cannot be repeated keeps them."""
    if policy == "recompute" and call.repeatable:
        return Way(policy, call.held, call.working)
    leaving = 0
    if policy == "offload":
        leaving = min(call.large, call.saved + (0 if inputs_stay else call.held))
    return Way("keep", call.held + call.saved - leaving, call.working, leaving, under_way=leaving)
