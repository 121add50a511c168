"""Plain Lightning with everything on the device: the ceiling, where it fits."""

from __future__ import annotations

from suite.systems.base import System


class Device(System):
    """Lightning's own strategy for one device, with nothing set: what a `System` does unless it says otherwise."""

    name = "device"
    title = "plain Lightning"
    offloads = False
