"""What a machine should reach, beside what `sp-lightning measure` has found, and the likely reason where it is slow.

PCIe and memory by what such links and channels give in practice, devices by what their makers state.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sp_lightning.planning.rates import Rates

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # by GT/s
_LANE = {1: 0.2, 2: 0.4, 3: 0.78, 4: 1.57, 5: 3.4, 6: 6.8}  # GB/s of copies for each lane
_LANES = 16
_BOTH_WAYS = 0.85  # of the sum of both
_CHANNEL = 25.0  # GB/s of a channel of memory: DDR4 gives 18 or so, DDR5 30
_CHANNELS = 2
# the parts of what memory, or a maker, states that the host's steps and large products reach
_OF_MEMORY = 0.8
_OF_MEMORY_INT8 = 0.5
_OF_STATED = 0.7
_SLOW = 0.7  # of what is expected


class Device(NamedTuple):
    """What the maker of a device states."""

    name: str  # a part of torch's name of it
    matmul: float  # TFLOP/s in bf16, of dense matrices
    generation: int  # of PCIe


_DEVICES = (
    Device("B200", 2250, 5),
    Device("H200", 989, 5),
    Device("H100 PCIe", 756, 5),
    Device("H100", 989, 5),
    Device("A100", 312, 4),
    Device("L40S", 362, 4),
    Device("A10", 125, 4),
    Device("L4", 121, 4),
    Device("RTX 5090", 209, 5),
    Device("RTX 4090", 165, 4),
    Device("RTX 3090", 71, 4),
)


class Link(NamedTuple):
    """The PCIe link of a device."""

    generation: int
    lanes: int

    @property
    def rate(self) -> float:
        """GB/s of copies in one direction, with all lanes that such a slot may have."""
        return _LANE[self.generation] * _LANES


@dataclass(frozen=True)
class Line:
    """One rate, and what it should be."""

    name: str
    found: float | None
    unit: str = "GB/s"
    expected: float | None = None
    reason: str = ""  # that it is slow for, if it is

    @property
    def is_slow(self) -> bool:
        """Whether it is far below what is expected."""
        return self.found is not None and self.expected is not None and self.found < _SLOW * self.expected

    def __str__(self) -> str:
        found = "not measured" if self.found is None else f"{self.found:.3g} {self.unit}"
        expected = "" if self.expected is None else f"{self.expected:.3g} {self.unit}"
        line = f"{self.name:<46}{found:>14}{expected:>14}"
        return f"{line}  slow: {self.reason}" if self.is_slow else line.rstrip()


def table(rates: Rates, link: Link | None) -> str:
    """Return the rates as a table, each beside what such a machine should reach."""
    lines = [rates.machine, "", f"{'':<46}{'measured':>14}{'such reach':>14}"]
    return "\n".join([*lines, *map(str, _lines(rates, link))])


def _lines(rates: Rates, link: Link | None) -> list[Line]:
    device = known_device(rates.machine)
    one_way = link.rate if link is not None else None
    memory = max(rates.host_memory, _CHANNELS * _CHANNEL)
    few = "few channels of memory, a share of a machine, or few cores"
    cores = "few cores, or others use them: memory gives more"
    return [
        Line("copies to the device", rates.to_device, expected=one_way, reason=_why_slow(rates, link)),
        Line("copies to the host", rates.to_host, expected=one_way, reason=_why_slow(rates, link)),
        Line(
            "copies both ways at once, together",
            rates.both_ways,
            expected=one_way and 2 * _BOTH_WAYS * one_way,
            reason="host memory, or the link, is shared by both directions",
        ),
        Line("host memory, all cores", rates.host_memory, expected=_CHANNELS * _CHANNEL, reason=few),
        Line("optimizer on the host, exact", rates.host_bandwidth, expected=_OF_MEMORY * memory, reason=cores),
        Line(
            "optimizer on the host, int8 moments",
            rates.host_bandwidth_int8,
            expected=_OF_MEMORY_INT8 * memory,
            reason=cores,
        ),
        Line("optimizer on the host, exact, beside copies", rates.step_beside_copies),
        Line("copies both ways, beside that", rates.copies_beside_step),
        Line("optimizer on the device, exact", rates.device_step),
        Line("optimizer on the device, int8 moments", rates.device_step_int8),
        Line(
            "matrix products in bf16",
            rates.matmul,
            unit="TFLOP/s",
            expected=device and _OF_STATED * device.matmul,
            reason="others use the device, or it is hot, or its power is limited",
        ),
    ]


def _why_slow(rates: Rates, link: Link | None) -> str:
    if not rates.is_pinned:
        return "host memory could not be page-locked: WSL allows little of it"
    if link is not None and link.lanes < _LANES:
        return f"the device has {link.lanes} lanes of {_LANES}: another slot may have more"
    return "the slot is of an older PCIe, or this process runs far from the device (see `numactl`)"


def known_device(name: str) -> Device | None:
    """Return what is known of a device with such a name."""
    return next((device for device in _DEVICES if device.name in name), None)


def link_of(device: torch.device) -> Link | None:
    """Return the link of a device: as the system states it, else as its maker does; None if neither is known."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    with suppress(AttributeError, OSError, KeyError, ValueError):
        place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        folder = _PCI_DEVICES / place
        speed = (folder / "max_link_speed").read_text().split()[0]
        lanes = int((folder / "current_link_width").read_text())
        if lanes > 0:
            return Link(_GENERATIONS[speed], lanes)
    known = known_device(properties.name)
    return None if known is None else Link(known.generation, _LANES)
