"""Units: weights that stream together, the modules whose calls need them, and where these modules keep them.

A *unit* enters and leaves the device as a whole: a layer, a block, or several small layers. Its *members* are the
modules whose calls enter it. `finder.py` finds them in a module tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from sp_lightning.pipeline.weights.weight import Twin, Weight

Group: TypeAlias = Any  # groups are made of units, and import this file


@dataclass
class Entry:
    """An entry of a module's `_parameters` that is a weight."""

    parameters: dict[str, nn.Parameter | None]
    key: str
    weight: Weight

    @property
    def current(self) -> nn.Parameter | None:
        """What the module has there now."""
        return self.parameters.get(self.key)

    @current.setter
    def current(self, parameter: nn.Parameter | None) -> None:
        self.parameters[self.key] = parameter

    @property
    def is_in_place(self) -> bool:
        """Whether that is the weight, as its master or its twin, and not what `functional_call` has put there."""
        current = self.current
        return current is self.weight.master or current is self.weight.twin.parameter


class Member:
    """A module whose call enters a unit (or, without a unit, only opens a step).

    Attributes:
        index: Its number among the members of streamed units; -1 for others.
        entries: Every entry that holds a weight which its call may use.
        swaps: For each of them its dictionary and key, and the twin, its leaf and the master that are exchanged there.
        recurrent: RNN modules at or below it, with the weights in their own list (`_flat_weights`).
        groups: Groups that have to be on the device for its call.
        twins: All twins of the arrangement, by the identity of their memory.
        called_in: Groups of other calls that its calls were inside of.
        running_calls: How many of its calls are under way.
        entered: How many times it has been called since it was attached.
        compiled: The compiled function that runs its forward; None if `compile=True` does not apply to it.
        looks_into: A member whose weights its forward inspects to choose a fast path (`nn.TransformerEncoder`).
        parameters_on_device: Parameters that its call may use and that live on the device.
    """

    def __init__(self, name: str, module: nn.Module, unit: Unit | None) -> None:
        self.name = name
        self.module = module
        self.unit = unit
        self.index = -1
        self.entries: list[Entry] = []
        self.swaps: list[tuple[dict[str, nn.Parameter | None], str, Twin, nn.Parameter, nn.Parameter]] = []
        self.recurrent: list[tuple[nn.RNNBase, list[Weight]]] = []
        self.groups: list[Group] = []
        self.twins: dict[int, Twin] = {}
        self.called_in: set[Group] = set()
        self.running_calls = 0
        self.entered = 0
        self.compiled: Callable[..., Any] | None = None
        self.looks_into: Member | None = None
        self.parameters_on_device: list[nn.Parameter] = []

    @property
    def is_streamed(self) -> bool:
        """Whether its unit streams."""
        return self.index >= 0

    @property
    def unit_name(self) -> str:
        """The name of its unit, or its own if it has none that streams."""
        return self.name if self.unit is None or self.unit.resident else self.unit.name

    def find_groups(self) -> None:
        """Determine which groups have to be on the device for its call, and what it puts into its modules."""
        self.groups = list({id(entry.weight.twin.group): entry.weight.twin.group for entry in self.entries}.values())
        self.swaps = [
            (entry.parameters, entry.key, entry.weight.twin, entry.weight.twin.parameter, entry.weight.master)
            for entry in self.entries
        ]


@dataclass(eq=False)
class Unit:
    """Weights that stream together, or all resident weights.

    Attributes:
        weights: The weights that the engine manages.
        weights_on_device: All weights of a unit that lives on the device, whose `weights` is empty.
        is_reached: Whether backward has reached it, so that its modules hold twins.
    """

    name: str
    resident: bool = False
    weights: list[Weight] = field(default_factory=list, repr=False)
    weights_on_device: list[Weight] = field(default_factory=list, repr=False)
    members: list[Member] = field(default_factory=list, repr=False)
    group: Group = field(init=False, repr=False)
    is_reached: bool = field(default=False, repr=False)

    @property
    def every_weight(self) -> list[Weight]:
        """All of its weights, wherever they live."""
        return [*self.weights, *self.weights_on_device]


@dataclass
class Division:
    """A module divided into units, as returned by `find_units`.

    Attributes:
        units: Streamed units in expected order.
        resident: All resident weights as one unit; its members are modules that own some.
        callers: Members without a unit: modules around units, whose calls open a step.
        unmanaged: Parameters that cannot be pointed to other memory (tensor subclasses, those of scripted modules,
            those that share memory with others); they are moved to the device.
    """

    units: list[Unit]
    resident: Unit
    callers: list[Member]
    unmanaged: dict[str, nn.Parameter]

    def put_in_order(self, names: Sequence[str]) -> None:
        """Expect units in the order of these names, and units that are not named after them."""
        number = {name: number for number, name in enumerate(names)}
        self.units.sort(key=lambda unit: number.get(unit.name, len(number)))
        for index, member in enumerate(member for unit in self.units for member in unit.members):
            member.index = index

    def leave_on_device(self, units: Collection[Unit]) -> None:
        """Stop managing the weights of these units, and manage only their calls."""
        left = {id(weight) for unit in units for weight in unit.weights}
        for unit in units:
            unit.weights_on_device, unit.weights = unit.weights, []
        for member in [*(member for unit in self.all_units() for member in unit.members), *self.callers]:
            member.parameters_on_device = [entry.weight.master for entry in member.entries if id(entry.weight) in left]
            member.entries = [entry for entry in member.entries if id(entry.weight) not in left]
            member.recurrent = [
                (module, weights) for module, weights in member.recurrent if not any(id(w) in left for w in weights)
            ]

    def all_units(self) -> list[Unit]:
        """Return the streamed units, and then the resident one if it holds anything."""
        return [*self.units, *([self.resident] if self.resident.weights else [])]
