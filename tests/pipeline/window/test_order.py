"""The order of uses: what is expected next, before and after it has been seen."""

from __future__ import annotations

from sp_lightning.pipeline.window.order import Order, Pass

F, B, N = Pass.FORWARD, Pass.BACKWARD, Pass.INFERENCE


def step(forward: list[int]) -> list[tuple[int, Pass]]:
    return [*((member, F) for member in forward), *((member, B) for member in reversed(forward))]


def seen(members: int, *steps: list[tuple[int, Pass]], then: list[tuple[int, Pass]] | None = None) -> Order:
    """An order that has seen whole steps, and the beginning of another one."""
    order = Order(members)
    for uses in (*steps, then or []):
        order.begin_step()
        for use in uses:
            order.visit(*use)
    return order


def test_a_dropped_layer_is_skipped_and_comes_back() -> None:
    usual, dropped = step([0, 1, 2, 3]), [(0, F), (2, F)]
    assert seen(4, usual, then=dropped).upcoming(2) == [3, 3]
    assert seen(4, usual, step([0, 2, 3]), step([0, 1, 2, 3]), then=[(0, F)]).upcoming(2) == [1, 2]


def test_steps_are_distinguished_by_their_beginning() -> None:
    """Validation in between, in another order, changes nothing in what training expects."""
    train, validate = step([0, 2]), [(1, N), (0, N)]
    assert seen(3, train, train, validate, then=train[:1]).upcoming(3) == [2, 2, 0]


def test_a_long_text_does_not_fill_memory() -> None:
    """Generating one is one step; beyond the limit the order of modules is expected."""
    order = seen(2, [(0, N), (1, N)] * 1000)
    assert order.upcoming(4) == [0, 1, 0, 1]
    assert sum(map(len, order._records.values())) <= 32
