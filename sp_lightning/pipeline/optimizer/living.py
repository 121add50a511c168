"""Units that live on the device, with gradients and optimizer state: moving them there and back, one after the other.

Between that they are plain parameters, which torch's own code steps; gates know their calls, and nothing else does.

[Note: living in several processes]
They live on the device in all processes, or in none, as masters on the host are shared: when processes meet, the plan
of the first one becomes everyone's (engine.py). Gradients are averaged when backward has ended, as DDP does, so that
each process steps its own copy with the same bits. State on the host is the first process's, which gives it to all when
a unit comes, and goes on with its own when it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sp_lightning.pipeline.optimizer.state import States
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.units.tree import HOST, copy_parameters, move_parameters, weights_on_accelerators
from sp_lightning.pipeline.weights.segment import HostMemory
from sp_lightning.pipeline.window.arrangement import Arrangement


class Living:
    """Moves units to the device and back, with gradients and optimizer state, in all processes at the same moment."""

    def __init__(self, device: torch.device, memory: HostMemory, states: States, processes: Processes | None) -> None:
        self._device = device
        self._memory = memory
        self._states = states
        self._processes = processes
        self._hooks: list[RemovableHandle] = []
        self._some_came = False

    @torch.inference_mode(False)  # the step may be one of an evaluation
    @torch.no_grad()
    def follow(self, arrangement: Arrangement) -> None:
        """Move what is to live elsewhere, before anything is laid out; first what leaves the device."""
        # all processes share state in one order
        units = sorted(arrangement.all_units, key=attrgetter("name"))
        for unit in units:
            leaving = [weight.master for weight in unit.weights if weight.lives]
            if self._processes is not None and not self._processes.box.is_keeper:
                self._states.drop(leaving)
            self._move(leaving, HOST)
        for unit in units:
            coming = [weight.master for weight in unit.weights_on_device if not weight.lives]
            if self._processes is not None:
                self._states.share(coming, self._processes)
            self._move(coming, self._device)
            if self._device == HOST:  # the emulated device: there is no other memory, so they are copied
                copy_parameters(coming)

    @torch.inference_mode(False)
    @torch.no_grad()
    def bring_home(self, module: nn.Module) -> None:
        """Move to the host what lives on the device, for good."""
        self._move(weights_on_accelerators(module), HOST)

    def watch(self, arrangement: Arrangement) -> None:
        """Note from now on whether backward brings gradients to what lives on the device; have state ready to visit."""
        self._states.lay_together(arrangement.in_window, self._memory.progress)
        for hook in self._hooks:
            hook.remove()
        trained = [parameter for parameter in arrangement.parameters_on_device if parameter.requires_grad]
        if self._processes is not None:
            self._hooks = [_call_after_gradients(parameter, self._note_gradient) for parameter in trained]

    def _note_gradient(self, _: Tensor) -> None:
        self._some_came = True

    def take_news(self) -> bool:
        """Tell whether gradients have come to what lives on the device since this was asked."""
        some_came = self._some_came
        self._some_came = False
        return some_came

    def _move(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Move parameters that are elsewhere; their state goes first, so that none is left behind after an error."""
        moving = [parameter for parameter in parameters if parameter.device != device]
        self._states.move(moving, device)
        move_parameters(moving, device)


def _call_after_gradients(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle
