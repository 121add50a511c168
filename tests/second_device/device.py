"""The device's side in Python: `torch.mtia` as `torch.cuda` would be, and an accelerator for Lightning's Trainer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lightning
import pytorch_lightning
import torch
import torch.utils._foreach_utils as foreach_utils
from typing_extensions import override

from . import SECOND_DEVICE

TOTAL_BYTES = 8 << 30  # so much memory it says to have; nothing is reserved


class Event:
    """Has happened as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Now."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """It has happened."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return (end._time - self._time) * 1000


class Stream:
    """Its work is done when it was asked for."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device(SECOND_DEVICE, 0)

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Now."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All is done."""
        return True


@contextmanager
def _unchanged(_: Any) -> Iterator[None]:
    """There is one device, and one stream that matters."""
    yield


def install(library: str) -> None:
    """Load the device, and have torch and Lightning know it.

    Args:
        library: What `build` has compiled.
    """
    torch.ops.load_library(library)
    torch.ops.second_device.set_limit(TOTAL_BYTES)
    for name, function in _api().items():
        setattr(torch.mtia, name, function)
    for namespace in (lightning, pytorch_lightning):
        _tell_lightning(namespace)
    _seed_with_the_host()
    _step_as_on_the_host()


def _api() -> dict[str, Any]:
    native: Any = torch.ops.second_device
    default = Stream()

    def fraction(device: Any = None) -> float:
        return float(native.limit() / TOTAL_BYTES)

    def set_fraction(value: float, device: Any = None) -> None:
        native.set_limit(int(value * TOTAL_BYTES))

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    return {
        "Event": Event,
        "Stream": Stream,
        "stream": _unchanged,
        "device": _unchanged,
        "current_stream": constant(default),
        "default_stream": constant(default),
        "set_stream": constant(None),
        "is_available": constant(True),
        "is_initialized": constant(True),
        "init": constant(None),
        "_lazy_init": constant(None),
        "_is_in_bad_fork": constant(False),
        "device_count": constant(1),
        "current_device": constant(0),
        "set_device": constant(None),
        "synchronize": constant(None),
        "empty_cache": constant(None),
        "get_device_properties": constant(SimpleNamespace(name=SECOND_DEVICE, total_memory=TOTAL_BYTES)),
        "is_bf16_supported": constant(True),
        "manual_seed": lambda seed: native.seed(seed % 2**63),
        "manual_seed_all": lambda seed: native.seed(seed % 2**63),
        "get_rng_state": lambda device=None: native.random_state(),
        "set_rng_state": lambda state, device=None: native.set_random_state(state),
        "get_per_process_memory_fraction": fraction,
        "set_per_process_memory_fraction": set_fraction,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - native.allocated(), TOTAL_BYTES),
        "memory_allocated": lambda device=None: native.allocated(),
        "memory_reserved": lambda device=None: native.allocated(),
        "max_memory_allocated": lambda device=None: native.peak(),
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(),
    }


def _tell_lightning(namespace: Any) -> None:
    """Give it an accelerator; its "auto" strategy for accelerators that it does not know would stay on the CPU."""

    class Second(namespace.accelerators.Accelerator):  # type: ignore[misc, name-defined]
        @override
        def setup_device(self, device: torch.device) -> None:
            pass

        @override
        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        @override
        def teardown(self) -> None:
            pass

        @staticmethod
        @override
        def parse_devices(devices: Any) -> list[int]:
            return [0]

        @staticmethod
        @override
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device(SECOND_DEVICE, 0)]

        @staticmethod
        @override
        def auto_device_count() -> int:
            return 1

        @staticmethod
        @override
        def is_available() -> bool:
            return True

        @staticmethod
        @override
        def name() -> str:
            return SECOND_DEVICE

    namespace.accelerators.AcceleratorRegistry.register(SECOND_DEVICE, Second, override=True)
    connector = sys.modules[f"{namespace.__name__}.trainer.connectors.accelerator_connector"]
    kind: Any = vars(connector)["_AcceleratorConnector"]
    choose = kind._choose_strategy

    def choose_strategy(self: Any) -> Any:
        strategy = choose(self)
        if isinstance(strategy, namespace.strategies.SingleDeviceStrategy) and isinstance(self.accelerator, Second):
            return namespace.strategies.SingleDeviceStrategy(device=torch.device(SECOND_DEVICE, 0))
        return strategy

    kind._choose_strategy = choose_strategy


def _seed_with_the_host() -> None:
    """As `torch.manual_seed` does for accelerators that torch was built for."""
    seed_host = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        torch.ops.second_device.seed(seed % 2**63)
        return seed_host(seed)

    torch.manual_seed = torch.random.manual_seed = manual_seed  # type: ignore[assignment]


def _step_as_on_the_host() -> None:
    """Plain training on the device takes the loops that the host takes, so that both round alike."""
    none: Callable[[], list[str]] = list
    vars(foreach_utils)["_get_foreach_kernels_supported_devices"] = none
    vars(sys.modules["torch.optim.optimizer"])["_get_foreach_kernels_supported_devices"] = none
