"""Plain Lightning with everything on the device: the ceiling, where it fits."""

from __future__ import annotations

from suite.systems.base import System


class Device(System):
    """Lightning's own single-device strategy with default settings, which is the default behavior of a `System`."""

    name = "device"
    title = "plain Lightning"
    offloads = False
