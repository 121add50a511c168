"""Steps of units, on the thread for work on host memory: handed over, and waited for.

They are handed over when `step()` is called, or while backward runs (clipping.py). Units whose state visits the
device are updated there instead (visit.py).

[Note: one pass]
A step reads and writes host memory as few times as possible:

    gradient (bf16) -> cast -> scale, clamp -> update of master and state -> copy for the device (bf16)

For our own optimizers, and torch's fused AdamW and Adam, this is one pass of a compiled kernel (`sp_lightning.optim`).
For others the code of the user's optimizer makes a pass for each operation. All bits are as after `optimizer.step()`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from sp_lightning.optim.of_torch import MOST_FACTORS, scaling_of
from sp_lightning.optim.passes import Work, taken
from sp_lightning.optim.rules import Pass
from sp_lightning.pipeline.gradients.gradient_memory import LandingBuffer
from sp_lightning.pipeline.gradients.routes import LateGradients
from sp_lightning.pipeline.gradients.segment_gradients import Gradient
from sp_lightning.pipeline.gradients.stream import GradientStream
from sp_lightning.pipeline.lanes.lanes import Job, Kind, Ticket
from sp_lightning.pipeline.operations import untracked
from sp_lightning.pipeline.optimizer.kinds import OptimizerWeights, Step, StepInput
from sp_lightning.pipeline.optimizer.state_file import StateFile
from sp_lightning.pipeline.optimizer.state_ring import StateRing, UnitOnDrive, pieces_of
from sp_lightning.pipeline.optimizer.visit import Visits, pack_state
from sp_lightning.pipeline.processes.box import CounterTicket, SharedMemory
from sp_lightning.pipeline.units.unit import Unit
from sp_lightning.pipeline.weights.segment import note_stepped
from sp_lightning.pipeline.weights.weight import Weight
from sp_lightning.pipeline.window.window import Window

# Gradients of this many elements are cast and scaled one by one; smaller ones together, to save Python's time.
_ALONE = 1 << 16

Update: TypeAlias = tuple[Tensor, Tensor, dict[str, Any], Tensor | None, Sequence[Tensor]]
"""A weight, its gradient, the optimizer's state, the copy that is sent, and the factors that scale the gradient."""

Generation: TypeAlias = tuple[SharedMemory, int]
"""Masters in shared memory, and the number that they have when a step is done."""


class UnitSteps:
    """Gives steps of units to the thread, and waits for them."""

    def __init__(self, window: Window, stream: GradientStream, visits: Visits, drive: StateRing | None) -> None:
        self.window = window
        self.stream = stream
        self.visits = visits
        self.drive = drive  # steps the units whose state is on a drive
        # Whether torch's fused kernels are taken where the user left the choice to torch. On the CPU the choice stays
        # torch's, as in plain training.
        self.fused = window.backend.device.type != "cpu"

    def step(self, unit: Unit, step: Step) -> None:
        """Have a unit stepped when its gradients have landed, on the device if it is updated there, else by the thread.

        Weights without a gradient stay as they are.
        """
        # The step must not keep gradients that have stayed on the device.
        inputs = step.inputs_by_unit.pop(unit, {})
        if not inputs:
            self.publish_step_without_gradients(unit, step.optimizer_weights)
            return
        # An earlier step may use the state that this one moves. Its error is raised before this step takes anything.
        self.window.finish_optimizer(unit)
        files: Mapping[int, StateFile] = {}
        if self.drive is not None:
            files = self.drive.places.bring(step, {gradient: state for gradient, (_, state) in inputs.items()})
            if files:  # there is no state in RAM that could visit
                unit.update.is_on_device = False
        is_on_device = unit.update.is_on_device and not unit.split_off
        if not (is_on_device and self._step_on_device(unit, step, inputs)):
            self._step_on_host(unit, step, inputs, files)
        self.window.stats.overlapped_steps += 1

    def _step_on_device(self, unit: Unit, step: Step, inputs: Mapping[Gradient, StepInput]) -> bool:
        """Have the device update the unit in this step, and tell whether it can."""
        visit = self.visits.visit_of(step, inputs)
        if isinstance(visit, str):
            self.visits.why_not = visit
            return False
        self.window.outdate(unit, {gradient.weight for gradient in inputs})
        unit.update.ticket = visit
        unit.update.pending_visit = visit
        self.window.stats.visits += 1
        return True

    def _step_on_host(
        self, unit: Unit, step: Step, inputs: dict[Gradient, StepInput], files: Mapping[int, StateFile]
    ) -> None:
        """Have a thread step a unit, and then release the buffers that its gradients may lie in.

        `files` have its state, by the state's identity, if that is on a drive.
        """
        by_segment = dict.fromkeys([gradient.of_segment for gradient in inputs])
        updates: defaultdict[int, list[Update]] = defaultdict(list)
        arrivals: list[Ticket] = []  # the tickets of copies that bring gradients
        buffers: list[LandingBuffer] = []
        # A tensor that is not the engine's any more is the user's `.grad`.
        waiting = {
            gradient: tensor
            for gradient, (tensor, _) in inputs.items()
            if gradient.is_on_device and tensor is gradient.tensor
        }
        if waiting:
            late = LateGradients(unit.name, waiting, self.stream.routes.landing)
            for gradient, tensor in late.landed.items():
                inputs[gradient] = tensor, inputs[gradient][1]
            self.window.stats.bytes_to_host += late.nbytes
            self.window.stats.late_gradients += 1
            # it keeps the gradients on the device until the job has read them
            arrivals.append(late)
            buffers.append(late.buffer)
        moved_bytes = 0
        for of_segment in by_segment:
            landing = of_segment.pass_landing()
            if landing is not None:
                buffers.append(landing)
            if of_segment.ticket is not None:
                arrivals.append(of_segment.ticket)
            for gradient, copy in zip(of_segment.gradients, of_segment.segment.copies, strict=True):
                if gradient in inputs:
                    weight = gradient.weight
                    tensor, state = inputs[gradient]
                    update = weight.master.data, tensor, state, copy, gradient.factors
                    updates[step.optimizer_weights.gradients[gradient]].append(update)
                    moved_bytes += 2 * weight.engine_memory.nbytes + tensor.nbytes
        weights = {gradient.weight for gradient in inputs}
        generations = self._next_generations(unit, step.optimizer_weights)
        action = partial(_step_unit, unit, step, updates, weights, generations)
        release = partial(_release_buffers, buffers)
        job = Job(action, arrivals, moved_bytes, release)
        if self.drive is not None and files and _are_one_pass(step, updates):
            states = [
                (files[id(state)], taken(Work(weight, None, state))[0])
                for group_updates in updates.values()
                for weight, _, state, *_ in group_updates
            ]
            job = on_drive = UnitOnDrive(after=arrivals, cleanup=release)
            on_drive.pieces = pieces_of(unit, states)
            on_drive.action = partial(action, partial(self.drive.step, on_drive))
        ticket = self._hand_over(unit, weights, job)
        for buffer in buffers:
            buffer.set_reader(ticket)

    def _hand_over(self, unit: Unit, weights: Set[Weight], job: Job) -> Ticket:
        """Give the thread a job that changes weights of a unit; first come units that the next forward needs first."""
        window = self.window
        window.outdate(unit, weights)
        job.rank = 0 if unit.resident else unit.index + 1
        job.after = [*window.copies_of([unit]), *job.after]
        if self.drive is not None and isinstance(job, UnitOnDrive):
            ticket: Ticket = self.drive.worker.submit(job)
        else:
            ticket = window.backend.trace.work(Kind.STEP, unit.name, job)
        unit.update.ticket = ticket
        # Split-off weights are in units of their own, which do not wait for this step.
        if unit.split_off:
            window.finish_optimizer(unit)
        return ticket

    def publish_step_without_gradients(self, unit: Unit, optimizer_weights: OptimizerWeights) -> None:
        """Publish a step in which this process steps no weight of a unit, or wait for the process that does so.

        If another process steps the weights, the thread waits for it. If this one steps for others, it publishes its
        next generation at once.
        """
        generations = self._next_generations(unit, optimizer_weights)
        if not generations:
            return
        self.window.finish_optimizer(unit)
        if unit.is_stepped_elsewhere:
            weights = optimizer_weights.weights.intersection(unit.weights)
            # the keeper's counter tells
            published = [CounterTicket(memory.box, memory.counters[:1], number) for memory, number in generations]
            job = Job(partial(note_stepped, unit.segments, weights), published)
            self._hand_over(unit, weights, job)
        else:
            for segment in unit.segments:  # the optimizer's own code may have stepped the masters
                segment.detect_changes()
                segment.share_edits()
                segment.refresh_copies()
            for memory, number in generations:
                memory.publish(number)

    def _next_generations(self, unit: Unit, optimizer_weights: OptimizerWeights) -> list[Generation]:
        """Count a step of masters that processes share, whether or not it changes them; each step counts once."""
        generations: list[Generation] = []
        if unit.update.is_early_in_all_processes:
            return generations
        for segment in unit.segments:
            memory = segment.memory.shared
            if memory is not None and not optimizer_weights.weights.isdisjoint(segment.weights):
                memory.generation += 1
                generations.append((memory, memory.generation))
        return generations

    def finish(self, units: Iterable[Unit]) -> None:
        """Wait until no step reads or writes the memory of these units any more.

        Raises:
            Exception: The first error of a step, when all steps have ended; other errors mostly have the same cause.
        """
        errors = []
        for unit in units:
            try:
                self.window.finish_optimizer(unit)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def settle(self) -> None:
        """Wait until every step is done, and no copy to the device reads a master: others may write to them."""
        try:
            self.finish(self.window.units)
        finally:
            self.window.finish_copies(self.window.units)

    def settle_all(self) -> None:
        """Wait for steps, copies and gradients: masters, their gradients and all state are complete afterwards."""
        self.settle()
        if self.drive is not None:
            self.drive.settle()
        self.stream.settle()
        self.window.has_nothing_in_flight = True


# ---------------------------------------------------------------------------- what a step does with a unit's weights


def _release_buffers(buffers: Sequence[LandingBuffer]) -> None:
    """Release buffers whose gradients were read."""
    for buffer in buffers:
        buffer.release()


def _step_unit(
    unit: Unit,
    step: Step,
    updates: Mapping[int, Sequence[Update]],
    weights: Set[Weight],
    generations: Sequence[Generation],
    in_pieces: Callable[[Sequence[Pass]], None] | None = None,
) -> None:
    """Step these weights of a unit, by the numbers of param groups; or have it done `in_pieces`."""
    with untracked():
        for segment in unit.segments:
            segment.refresh_copies(weights)
        passes: list[Pass] = []
        for number, group_updates in updates.items():
            if in_pieces is None:
                update_weights(step, number, group_updates)
            else:
                works = [Work(*update[:4], scaling_of(update[4])) for update in group_updates]
                passes += step.one_passes[number].passes_of(works)
        if in_pieces is not None:
            in_pieces(passes)
        note_stepped(unit.segments, weights)
        for memory, number in generations:
            memory.publish(number)
        if unit.update.is_on_device:  # from the next step on: this one may have made the state
            pack_state(unit, step.optimizer)


def _are_one_pass(step: Step, updates: Mapping[int, Sequence[Update]]) -> bool:
    """Tell whether each of these updates is one pass over memory."""
    return all(
        len(update[4]) <= MOST_FACTORS and step.one_passes[number].takes(Work(*update[:4]))
        for number, group_updates in updates.items()
        for update in group_updates
    )


def update_weights(step: Step, number: int, updates: Sequence[Update]) -> None:
    """Update masters and state as `optimizer.step()` would with the settings of a param group, and copies.

    The caller turns gradients, inference mode and overrides of torch functions off.
    """
    code, one_pass = step.codes[number], step.one_passes[number]
    # First steps run separately: the fused kernel of SGD wants momentum buffers for all of its parameters, or for none.
    together: dict[bool, list[Update]] = {}
    works: list[Work] = []
    for update in updates:
        weight, gradient, state, copy, factors = update
        work = Work(weight, gradient, state, copy, scaling_of(factors))
        if one_pass.takes(work):
            works.append(work)
        elif weight.numel() < _ALONE:
            is_first = state.get("momentum_buffer") is None
            together.setdefault(is_first, []).append(update)
        else:
            _update(code, [update])
    for small in together.values():
        _update(code, small)
    if works:
        one_pass.step(works)


def _update(code: Callable[..., None], updates: Sequence[Update]) -> None:
    """Cast and scale gradients, run the optimizer's code, and write copies."""
    for weight, gradient, _, _, factors in updates:
        factors = [factor for factor in factors if factor != 1]
        if factors or gradient.dtype != weight.dtype:
            gradient = gradient.to(weight.dtype, copy=True)
            for factor in factors:
                gradient.mul_(factor)
        weight.grad = gradient
    code({weight: state for weight, _, state, _, _ in updates})
    for weight, _, _, copy, _ in updates:
        if copy is not None:
            copy.copy_(weight)
