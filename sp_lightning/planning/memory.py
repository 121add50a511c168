"""The device and host memory that a step takes with a given choice, and the ways that activations can go.

[Note: the peak]
From its forward to its backward a unit holds something: all that it saved, or its inputs alone, or next to nothing if
these wait on the host. While it computes, in forward and in backward, it takes more. Meanwhile the units before it hold
theirs, and those after it hold nothing yet, or nothing any more. What the unit before it saved may still be leaving for
the host, or be coming back already. So the peak is the largest, over all units, of what the units before one hold, what
of the last of them is under way, and what that one needs to compute; or, at the turn from forward to backward, what all
units hold and what is taken after them. Gradients of units that visit stay from their backward until they are stepped,
in the next forward: while a unit computes, its own and those of units after it are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sp_lightning.optim.on_device import BYTES_MEANWHILE, PIECE
from sp_lightning.pipeline.activations.memory import Footprint
from sp_lightning.pipeline.gradients.routes import landing_buffers
from sp_lightning.pipeline.optimizer.pieces import PIECES_AT_ONCE
from sp_lightning.pipeline.options import Policy
from sp_lightning.pipeline.window.places import place_in_arena
from sp_lightning.planning.work import Choice, Way, Workload


def device_bytes(workload: Workload, choice: Choice) -> int:
    """Return the peak device memory of weights, gradients and activations."""
    return weight_bytes(workload, choice) + gradient_bytes(workload, choice) + activation_bytes(workload, choice)


def weight_bytes(workload: Workload, choice: Choice) -> int:
    """Return the device memory for weights, for all else of units that live there, and for the pieces of visits."""
    everything, living = workload.everything, set(choice.living)
    streamed = [unit.weight_bytes for number, unit in enumerate(everything) if number not in living]
    resident = 0 if len(workload.units) in living else streamed.pop()
    pieces = max((everything[number].visit_bytes for number in choice.visiting), default=0)
    living_bytes = sum(everything[number].bytes_on_device for number in living)
    return _arena_bytes(tuple(streamed), choice.k) + resident + living_bytes + pieces


def gradient_bytes(workload: Workload, choice: Choice) -> int:
    """Return the device memory for gradients on their way to the host."""
    return workload.staging_buffers * max(workload.gradients_to_host(choice))


def landing_bytes(workload: Workload, choice: Choice) -> int:
    """Return the host memory for gradients: for few where they are stepped or added as they come, else for all."""
    gradients = sorted(workload.gradients_to_host(choice), reverse=True)
    if workload.stepping == "in backward" or workload.adds_up:
        gradients = gradients[: landing_buffers(len(gradients))]
    return sum(gradients)


def host_bytes(workload: Workload, choice: Choice) -> int:
    """Return the host memory for weights, gradients, optimizer state, and activations that wait there."""
    living = set(choice.living)
    on_host = sum(unit.host_bytes for number, unit in enumerate(workload.everything) if number not in living)
    return on_host + landing_bytes(workload, choice) + sum(way.leaving for way in workload.ways(choice))


def first_host_bytes(workload: Workload) -> int:
    """Return the host memory of the steps before there is a plan: nothing lives on the device."""
    return host_bytes(workload, Choice(1))


def peak(ways: Sequence[Way], turn: int = 0, staying: Sequence[int] = ()) -> int:
    """Return the most bytes that are on the device at once, if so many are taken at the turn; see [Note: the peak].

    Of each unit's gradients so many bytes stay.
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
    """Return the peak device memory for saved tensors, gradients that stay, and what units and the turn take."""
    if not workload.trains:
        return workload.outside_bytes
    staying: list[int] = []
    if workload.gradients_stay and choice.visiting:
        visiting = set(choice.visiting)
        staying = [unit.gradient_bytes * (number in visiting) for number, unit in enumerate(workload.units)]
    return peak(workload.ways(choice), workload.turn_bytes, staying) + workload.outside_bytes


@lru_cache(maxsize=4096)  # the same window is tried with many ways for activations
def _arena_bytes(sizes: tuple[int, ...], slots: int) -> int:
    return place_in_arena(sizes, slots)[1]


def bytes_of_pieces(nbytes: int, numbers: int) -> int:
    """Return the device memory for the pieces of a visit of so many bytes that steps so many numbers, and its steps."""
    of_piece = min(PIECE, numbers)
    return (PIECES_AT_ONCE * nbytes // max(1, numbers) + BYTES_MEANWHILE) * of_piece


def ways_of(
    calls: Sequence[Footprint], second_forward: float, policies: Sequence[Policy], inputs_stay: bool = False
) -> tuple[Way, ...]:
    """Return the ways of a unit's activations, by preference: one policy for all members, as far as they can follow.

    Its second forward takes so many seconds. If `inputs_stay`, those of the first member are the batch, which whoever
    runs the step holds.
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
