"""Recordings of steps that were never taken: a machine with given times for each unit, played through on paper."""

from __future__ import annotations

from sp_lightning.pipeline import Kind, Lane, Recording, Span


def make_recording(
    units: int = 8,
    k: int = 2,
    steps: int = 1,
    forward: float = 2e-3,
    backward: float = 4e-3,
    load: float = 1e-3,
    gradients: float = 1e-3,
    step: float = 1e-3,
    visit: float = 0.0,
    nbytes: int = 64 << 20,
) -> Recording:
    """A chain of equal units through `k` slots; seconds for each unit. If visits take any, all units visit."""
    free = dict.fromkeys(Lane, 0.0)
    spans: list[Span] = []
    moments = []

    def run(kind: Kind, name: str, seconds: float, ready: float = 0.0, nbytes: int = 0) -> float:
        if seconds:
            begin = max(free[kind.lane], ready)
            free[kind.lane] = begin + seconds
            spans.append(Span(kind.lane, kind, name, begin, begin + seconds, nbytes))
        return free[kind.lane]

    stepped = [0.0] * units
    left = [0.0]  # when each slot was given up
    for _ in range(steps):
        order = [(Kind.FORWARD, unit) for unit in range(units)]
        order += [(Kind.BACKWARD, unit) for unit in reversed(range(units))]
        moments.append(free[Lane.COMPUTE])
        for place, (kind, unit) in enumerate(order):
            name = f"model.layers.{unit}"
            if not units <= place < units + k:  # the last ones stay for the turn
                slot = left[-k] if len(left) >= k else 0.0
                arrived = run(Kind.LOAD, name, load, max(slot, stepped[unit] if place < units else 0.0), nbytes)
                if arrived > free[Lane.COMPUTE]:
                    run(Kind.STALL, "weights", arrived - free[Lane.COMPUTE])
            run(kind, name, forward if kind is Kind.FORWARD else backward)
            left.append(free[Lane.COMPUTE])
            if kind is Kind.BACKWARD:
                landed = run(Kind.GRADIENTS, name, gradients, free[Lane.COMPUTE], nbytes)
                if visit:
                    up = run(Kind.STATE_UP, name, load, free[Lane.COMPUTE], nbytes)
                    stepped[unit] = run(Kind.VISIT, name, visit, up, 2 * nbytes)
                    run(Kind.STATE_DOWN, name, gradients, stepped[unit], nbytes)
                else:
                    stepped[unit] = run(Kind.STEP, name, step, landed, nbytes)
    moments.append(free[Lane.COMPUTE])
    return Recording(sorted(spans, key=lambda span: span.begin), list(zip(moments[:-1], moments[1:], strict=True)))
