"""The window: in which order units come, wait and go, and what a prefetch must leave alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.units.unit import Residency, Unit
from sp_lightning.pipeline.window.order import Order, Pass
from sp_lightning.pipeline.window.window import Window

from ..parts import PendingTicket, RecordingBackend, slots


class Scene:
    """A window over units of equal size; unit i is member i of the order."""

    def __init__(self, count: int, k: int) -> None:
        self.units = slots(count, k)
        self.order = Order(count)
        self.backend = RecordingBackend()
        self.stats = Stats()
        self.window = Window(self.units, self.units, self.order, self.backend, self.stats)

    def use(self, index: int, direction: Pass = Pass.INFERENCE) -> None:
        """What the pipeline does when a unit is called."""
        unit = self.units[index]
        self.order.visit(index, direction)
        self.window.bring(unit)
        unit.users += 1
        self.window.prefetch()
        assert self.bytes_of(unit) == {index}, "the unit would compute with another's weights"
        unit.users -= 1
        self.window.prefetch()

    def loaded(self) -> list[int]:
        return [unit.index for unit in self.units if unit.residency is not Residency.ABSENT]

    @staticmethod
    def bytes_of(unit: Unit) -> set[int]:
        return set(unit.place.tolist())


def test_an_evicted_place_is_poisoned() -> None:
    """A read of a slot that was given away shows as NaN."""
    scene = Scene(2, 1)
    scene.window.bring(scene.units[0])
    scene.window._evict(scene.units[0])
    assert Scene.bytes_of(scene.units[0]) == {0xFF}


def test_a_group_in_use_is_never_evicted() -> None:
    """A backward inside of the forward of a unit that has the place: an error that says what to do, no wrong number."""
    scene = Scene(2, 1)
    scene.window.bring(scene.units[0])
    scene.units[0].users = 1
    with pytest.raises(RuntimeError, match=r"larger `k`.*`resident`"):
        scene.window.bring(scene.units[1])
    assert scene.loaded() == [0]


# ------------------------------------------------------------------------------------------- while masters are stepped


def stepping(scene: Scene, index: int, ticket: PendingTicket | None = None) -> PendingTicket:
    """An optimizer starts to step the masters of a unit."""
    ticket = ticket or PendingTicket()
    scene.window.outdate(scene.units[index], set())
    scene.units[index].being_stepped = ticket
    return ticket


def test_a_copy_behind_a_step_is_waited_for_before_its_place_is_given_away() -> None:
    """It begins when the step is done, and might overwrite what comes next."""
    scene = Scene(2, 1)
    ticket = stepping(scene, 0)
    scene.window.prefetch()
    assert scene.units[0].residency is not Residency.ABSENT
    scene.backend.calls.clear()
    opener = threading.Timer(0.03, ticket.finish)
    opener.start()
    scene.window.bring(scene.units[1])
    assert ticket.done
    opener.join()
    assert scene.stats.optimizer_waits == 1
    assert scene.units[0].being_stepped is None
    assert scene.backend.said("upload") == ["upload"]


def test_computing_waits_for_unused_copies_before_their_slot_is_refilled() -> None:
    """The two might not keep their order: one of them may have waited for the optimizer."""
    scene = Scene(2, 1)
    scene.window.prefetch()
    scene.backend.calls.clear()
    scene.window.bring(scene.units[1])
    assert scene.backend.said("wait", "upload") == ["wait", "upload", "wait"]


def calls_in(action: Callable[[], None]) -> int:
    """How many Python functions are called."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("share", [0, 0.5, 1], ids=["two places", "half", "all"])
@pytest.mark.parametrize("what", ["inference", "training", "stepping in backward"])
def test_the_cost_of_a_use_does_not_grow_with_the_model(share: float, what: str) -> None:
    """The thread that does this has to run ahead of the device."""

    def calls_per_use(count: int) -> float:
        scene = Scene(count, max(2, int(share * count)))
        step = [(index, Pass.INFERENCE if what == "inference" else Pass.FORWARD) for index in range(count)]
        if what != "inference":
            step += [(index, Pass.BACKWARD) for index in reversed(range(count))]

        def run() -> None:
            if what != "stepping in backward":
                scene.window.suspect_all()
            scene.window.begin_step()
            for use in step:
                scene.use(*use)
                if what == "stepping in backward" and use[1] is Pass.BACKWARD:
                    scene.window.outdate(scene.units[use[0]], set())

        for _ in range(3):
            run()
        return calls_in(run) / len(step)

    assert calls_per_use(200) < 1.3 * calls_per_use(20)
