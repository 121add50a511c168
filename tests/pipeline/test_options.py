"""Options: each wrong value raises a ValueError that names the argument and the value, before any work."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from sp_lightning.pipeline import PipelineOptions
from sp_lightning.pipeline.options import parse_bytes

WRONG: list[tuple[str, Any]] = [
    *[("k", value) for value in (0, -1, True, False, "two", 1.5, None, "Auto")],
    *[("k_prime", value) for value in (0, -3, True, "auto", 2.0, None)],
    *[("memory_budget", value) for value in (0, -1, 1, 1.5, True, 0.0, float("nan"), float("inf"), [1], nn.Linear)],
    *[("memory_budget", value) for value in ("", "12 parsecs", "-1GB", "GB", "0", "1,5GB", "1e9")],
    *[("units", value) for value in (5, [], (), [5], ["Block", 3], {"Block"}, 1.5, b"Block")],
    *[("resident", value) for value in ("head", [3], [nn.Linear], [None], None, 7)],
    *[("activations", value) for value in ("drop", "Keep", None, True, ["keep"])],
    *[("pin_memory", value) for value in (1, 0, "yes", None, "auto")],
    *[("host_threads", value) for value in (0, -1, 1.5, True, "all", None)],
    *[
        ("compile", value)
        for value in (1, 0, "auto", "inductor", {}, None, {"disable": True}, {"mode": "max-autotune"})
    ],
    *[("debug", value) for value in (1, 0, "auto", None)],
]


def in_short(choice: tuple[str, Any]) -> str:
    """The same in every process, which runs a part of the tests."""
    name, value = choice
    return f"{name}={value!r:.30}".split(" at 0x")[0]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=map(in_short, WRONG))
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}=") as caught:
        PipelineOptions(**{name: value})
    if not isinstance(value, str):  # amounts in text are shown in bytes
        assert repr(value) in str(caught.value)


def test_k_prime_must_fit_into_k() -> None:
    """Units that move together must fit among those on the device; the message has both numbers and the range."""
    with pytest.raises(ValueError, match=r"`k_prime=5`.*`k=4`.*1 <= k_prime <= 4"):
        PipelineOptions(k=4, k_prime=5)
    PipelineOptions(k=4, k_prime=4)
    PipelineOptions(k="auto", k_prime=5)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("7", 7), ("12GB", 12 * 10**9), ("12GiB", 12 * 2**30), ("1.5 mib", 3 * 2**19), (0.5, 500),
        (1.0, 1000), (2, 2), (" 1.5 gib ", 3 * 2**29), ("100 B", 100),
    ],
)  # fmt: skip
def test_amounts_of_memory(budget: int | float | str, expected: int) -> None:
    """An int is bytes, a float is a fraction of the device, text has a unit: 1.0 is the whole device."""
    assert parse_bytes(budget, device_bytes=1000) == expected
    assert PipelineOptions(memory_budget=budget).memory_budget is budget


def test_a_fraction_of_an_unknown_device_is_no_limit() -> None:
    assert parse_bytes(0.5, device_bytes=None) is None
