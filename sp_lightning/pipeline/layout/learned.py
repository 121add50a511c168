"""What a pipeline finds out while it runs: each finding makes the next arrangement better.

The step in which something is found is right without it; the parts that find it see to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from sp_lightning.pipeline.layout.window_plan import WindowPlan
from sp_lightning.pipeline.weights.host import HostBuffer
from sp_lightning.pipeline.weights.units import Unit
from sp_lightning.pipeline.weights.weight import Weight


class Learned:
    """What a pipeline finds out while it runs, for the next arrangement.

    Attributes:
        resident: Names of weights that are used outside of their unit.
        order: Names of units in the order in which the first step called them; None before that.
        called: The same, while the first step is not over.
        split: Modules that are not called themselves, only their children are.
        whole: Modules that are not divided, because they are called several times in a forward.
        lowered: Masters that autocast lowers, by identity.
        used_as_is: Masters that are used in their own dtype, by identity.
        assumed: Masters taken for lowered because of the layer they are in, until that layer has been watched.
        observed: For each member, by its module and masters, how its forward has been watched (see `Member`).
        short_of_memory: Whether the window has to be as small as it can be.
        buffers: Host memory of earlier arrangements, by the identities of the masters in it.
        plan: What a planner has chosen for the window.
        touched_outside: Weights that were used outside of their unit since the arrangement was made.
        fresh_starts: How often memory did not suffice for what had been chosen, and less of it was to be chosen anew.
        trained: Parameters that have required a gradient in some step, by identity.
        outdated: Whether something was learned that asks for another arrangement.
    """

    def __init__(self) -> None:
        self.resident: list[str] = []
        self.order: list[str] | None = None
        self.called: dict[str, None] = {}
        self.split: list[nn.Module] = []
        self.whole: list[nn.Module] = []
        self.lowered: set[int] = set()
        self.used_as_is: set[int] = set()
        self.assumed: set[int] = set()
        self.observed: dict[tuple[int, ...], set[bool]] = {}
        self.short_of_memory = False
        self.buffers: dict[tuple[int, ...], HostBuffer] = {}
        self.plan: WindowPlan | None = None
        self.touched_outside: list[Weight] = []
        self.fresh_starts = 0
        self.trained: set[int] = set()
        self.outdated = False

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step with gradients begins. If more are trained than ever (a user unfreezes layers), units take more."""
        trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self.outdated |= bool(self.trained) and not trained <= self.trained
        self.trained |= trained

    def note_call(self, unit: str) -> None:
        """A unit is called: in the first step, that tells the order."""
        if self.order is None:
            self.called.setdefault(unit)

    def release_buffers(self) -> None:
        """The pipeline ends."""
        for buffer in self.buffers.values():
            buffer.release()

    def leave_memory_of(self, weight: Weight) -> None:
        """The next arrangement makes other memory for a weight, and for those that travel with it."""
        for key in [key for key in self.buffers if id(weight.master) in key]:
            self.buffers.pop(key).release()

    def forget_all_but(self, alive: set[int]) -> None:
        """Forget what is not among these parameters and modules, by identity: others may come to have that."""
        self.lowered &= alive
        self.used_as_is &= alive
        self.assumed &= alive
        self.trained &= alive
        self.observed = {key: seen for key, seen in self.observed.items() if alive.issuperset(key)}

    def take_in(self, lowered: set[Weight], used_as_is: set[Weight], watched: list[Weight]) -> None:
        """Note what was seen of weights under autocast; it may be that they should be sent in another dtype."""
        self.assumed -= {id(weight.master) for weight in watched}
        self.lowered |= {id(weight.master) for weight in lowered}
        self.used_as_is |= {id(weight.master) for weight in used_as_is}
        to_lower = any(
            not (weight.lowered or weight.unit.resident or id(weight.master) in self.used_as_is) for weight in lowered
        )
        self.outdated |= to_lower or any(weight.lowered for weight in used_as_is)

    def assume_lowered(self, weights: Iterable[Weight]) -> None:
        """Autocast casts the weights of such layers, as far as is known before one has been watched."""
        masters = {id(weight.master) for weight in weights}
        self.lowered |= masters
        self.assumed |= masters

    def conclude(self, units: Sequence[Unit]) -> bool:
        """Between steps: what follows from all this for the next arrangement.

        Args:
            units: The streamed units of the present one, in the order in which they are expected.

        Returns:
            Whether another arrangement is called for.
        """
        self._look_at_the_order(units)
        if not self.outdated:
            return False
        self.outdated = False
        members = [member for unit in units for member in unit.members]
        for weight in self.touched_outside:
            users = [member for member in members if any(place.weight is weight for place in member.places)]
            never_called = [m.module for m in users if m.entered == 0 and any(m.module.children())]
            if never_called:  # a mere container: its children are called by its parent
                self.split += never_called
            else:
                self.resident.append(weight.name)
        self.touched_outside.clear()
        self.plan = None  # it was made for other units
        return True

    def _look_at_the_order(self, units: Sequence[Unit]) -> None:
        """Ask for units to be laid out anew if the first step did not call them in the order of the modules.

        Units that follow each other must not share a place, or the later one cannot be fetched ahead.
        """
        if self.order is None and self.called:
            self.order = list(self.called)
            self.outdated |= self.order != [unit.name for unit in units if unit.name in self.called]
