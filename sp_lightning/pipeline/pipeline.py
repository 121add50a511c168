"""The pipeline: the engine's public object, and the plan that it follows, in numbers and as a table.

It runs the steps; between steps weights may get other places.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from sp_lightning.pipeline.calls.calls import Calls
from sp_lightning.pipeline.calls.gates import install_gate, keep_out_of_graphs, open_steps, remove_gate
from sp_lightning.pipeline.calls.story import Story
from sp_lightning.pipeline.engine import Engine, Planner
from sp_lightning.pipeline.graphs import Opener
from sp_lightning.pipeline.lanes.accelerator import full_device, make_backend
from sp_lightning.pipeline.lanes.at_work import optimizer_steps
from sp_lightning.pipeline.lanes.backend import Backend
from sp_lightning.pipeline.lanes.lanes import Recording
from sp_lightning.pipeline.operations import autocast_dtype
from sp_lightning.pipeline.optimizer.optimizers import listen_to_optimizers, stop_listening
from sp_lightning.pipeline.optimizer.staying import HOST, move_parameters, weights_on_accelerators
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.placing.arrangement import Arrangement
from sp_lightning.pipeline.placing.places import WindowPlan
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.stats import Progress, readable_bytes
from sp_lightning.pipeline.torch_private import in_backward, run_backward_by
from sp_lightning.pipeline.units.tree import check_module


@dataclass(frozen=True)
class Summary:
    """The plan of a pipeline, and the memory that it takes at the moment; `str()` of it is a table."""

    device: str  # the device that forward and backward run on
    units: int  # the number of units, each of `k_prime` neighbors
    k: int  # units on the device at once
    parameters: int  # elements of all weights
    model_bytes: int  # bytes of all weights in their own dtypes
    # device memory for slots, resident weights, units that stay there with all their state, and updates on the device
    device_bytes: int
    gradient_bytes: int  # device memory for gradients on their way to the host
    host_bytes: int  # host memory for weights, and for the copies of them that are sent
    host_gradient_bytes: int  # host memory for gradients that has been allocated so far
    optimizer_bytes: int  # host memory for optimizer state
    # the number of units whose optimizer state is on a drive, and its bytes, which each step reads and writes
    on_drive: tuple[int, int]
    lowered: int  # weights that are sent in autocast's dtype
    pinned: bool  # whether all memory that is sent is pinned
    # names of units, of resident weights, of units that stay on the device, and of units that are updated there
    unit_names: tuple[str, ...]
    resident: tuple[str, ...]
    living: tuple[str, ...]
    visiting: tuple[str, ...]
    plan: WindowPlan | None  # the planner's choice and its prediction; None if nothing was planned

    @classmethod
    def of(cls, engine: Engine) -> Summary:
        """Return the summary of an engine."""
        arrangement, memory = engine.arrangement, engine.memory
        layout = arrangement.layout
        weights = [weight for unit in arrangement.all_units for weight in unit.every_weight]
        own_memory = sum(segment.memory.nbytes for segment in arrangement.segments)
        state_bytes = engine.optimizers.states.nbytes([weight.master for weight in arrangement.weights])
        on_drive = (0, 0) if engine.drive is None else engine.drive.places.on_drive()
        gradients = memory.nbytes_for("gradients") + memory.nbytes_for("sums")
        return cls(
            device=str(engine.device),
            units=len(arrangement.units),
            k=layout.window.k,
            parameters=sum(weight.master.numel() for weight in weights),
            model_bytes=sum(weight.nbytes for weight in weights),
            device_bytes=layout.device_bytes + engine.visits.nbytes(),
            gradient_bytes=engine.stream.routes.staging.nbytes(),
            host_bytes=own_memory + memory.nbytes_for("copies"),
            host_gradient_bytes=engine.stream.routes.landing.nbytes() + gradients,
            optimizer_bytes=max(0, state_bytes - on_drive[1]),
            on_drive=on_drive,
            lowered=sum(weight.lowered for weight in weights),
            pinned=arrangement.is_pinned,
            unit_names=tuple(unit.name for unit in arrangement.units),
            resident=tuple(weight.name for weight in arrangement.resident.weights),
            living=tuple(unit.name for unit in layout.units_on_device),
            visiting=tuple(unit.name for unit in arrangement.in_window if unit.update.is_on_device),
            plan=engine.plan if layout.window is engine.plan else None,
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as pairs of a name and a value."""
        place = "the GPU" if self.device != "cpu" else "the CPU, as if it were a GPU"
        streamed = f"all stay on {place}" if self.k >= self.units else f"{self.k} at a time on {place}"
        pinned = ", pinned" if self.pinned else ""
        updates = "on the CPU"
        if self.living or self.visiting:
            updates = (
                f"{len(self.living)} stay on the GPU, {len(self.visiting)} are updated there, the others on the CPU"
            )
        count, nbytes = self.on_drive
        if count:
            updates += (
                f"; state of {count} of {self.units} units is on the drive: {nbytes / 1e9:.1f} GB written per step"
            )
        return [
            ("device", self.device),
            ("units", f"{self.units}: {streamed}"),
            ("GPU memory for weights", f"{readable_bytes(self.device_bytes)} of {readable_bytes(self.model_bytes)}"),
            ("CPU memory for weights", f"{readable_bytes(self.host_bytes)}{pinned}"),
            ("optimizer updates", updates),
        ]

    def __str__(self) -> str:
        return as_table(self.rows())


def as_table(rows: Sequence[tuple[str, str]]) -> str:
    """Format names and values as aligned lines of text."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


_attached: set[Pipeline] = set()


class Pipeline:
    """Streams a module's units between CPU memory and the GPU while it computes.

    Constructing it attaches it to the module; `detach` undoes that. In between, use the module as usual: call it, call
    `backward`, step any torch optimizer over its parameters, save and load its state.

    Args:
        module: The module. Weights that are on an accelerator move to CPU memory.
        device: The device to compute on; by default the current accelerator, or else the CPU.
        options: The options; the defaults work.
        backend: Allocates and copies memory; by default the backend for the device.
        planner: Chooses, between steps, what `options` leave open; without one the window keeps its initial size.
        processes: All processes that train the same model, if there are several: gradients are averaged over them.
        progress: Shows the progress of long work; by default in the log.
        leaves_steps_open: Whether a call's step continues after the call, for loops that declare no steps.

    Attributes:
        module: The module.
        device: The device that forward and backward run on.
        backend: Allocates and copies memory.
        options: The options.
        processes: All processes that train the model; None if there are no others.
        stats: Counters of the engine's work.
        optimizers: Steps optimizers while the device computes, clips gradients and unscales them.
        waiting: Decides whose gradients wait on the device.

    Raises:
        ValueError: If an option does not fit the module or the available memory. After any exception, also a
            KeyboardInterrupt, nothing is attached: the module is a plain one on the CPU, as `detach` leaves it.

    Examples:
        >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
        >>> pipeline = Pipeline(model, "cpu")
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> pipeline.detach()
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | None = None,
        *,
        options: PipelineOptions | None = None,
        backend: Backend | None = None,
        planner: Planner | None = None,
        processes: Processes | None = None,
        progress: Progress | None = None,
        leaves_steps_open: bool = False,
    ) -> None:
        self.module = module
        check_module(module, {id(parameter) for other in _attached for parameter in other.module.parameters()})
        self.processes = processes
        self.device = full_device(device)
        self.options = options or PipelineOptions()
        if backend is None:
            # A machine's processes divide its cores. The one that steps for all of them may use every core.
            count = 1 if processes is None or processes.box.is_keeper else processes.box.count
            backend = make_backend(self.device, self.options.host_threads, count, self.options.debug)
        self.backend = backend
        backend.pins = backend.pins and self.options.pin_memory
        keep_out_of_graphs(backend)
        engine = Engine(
            module,
            self.device,
            self.options,
            backend,
            planner or Planner(),
            processes,
            progress or Progress(),
        )
        self._parts = engine
        self._story = Story(engine)
        self._calls = Calls(self._story, self.device, leaves_steps_open)
        self.stats = engine.stats
        self.optimizers = engine.optimizers
        self.waiting = engine.waiting
        try:
            self._attach()
        except BaseException:
            self._give_back()
            raise

    def _attach(self) -> None:
        processes = self.processes
        move_parameters(weights_on_accelerators(self.module), HOST)
        if processes is not None:
            processes.broadcast_module(self.module)
        # An autocast that is on now is likely to be on in steps, too.
        self._parts.learned.autocasts.default = autocast_dtype(self.device.type)
        self._parts.take_over(self._story, self._calls)
        if processes is not None:  # unmanaged parameters are not in shared memory
            processes.share_copies()
        listen_to_optimizers(self.optimizers)
        _attached.add(self)
        atexit.register(self._end_threads)

    # ----------------------------------------------------------------------------------------------------- for users

    @contextmanager
    def step(self, *, continues_last_step: bool = False) -> Iterator[None]:
        """Open the scope of a training, validation or prediction step, or of a backward pass; may be nested.

        A call of the module opens one by itself. A wider one is needed around code that uses weights outside of module
        calls, and around `torch.autograd.grad(..., create_graph=True)`.

        Args:
            continues_last_step: Whether it is for a backward pass of the last step, although that has had one.
        """
        self._check_attached()
        opener = Opener.LAST_STEP if continues_last_step else Opener.PROGRAM
        with self._calls.alone(), self._calls.step(opener):
            yield

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradients of all weights by their norm, which is returned, as `clip_grad_norm_` of torch does.

        Torch's function does the same. Neither reads each gradient: the norms come with the gradients, and the
        optimizer clips while it updates. Your code waits for the norms.
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def record(self) -> AbstractContextManager[Recording]:
        """Record what the lanes do in this scope: units computing, copies, work on the CPU, and stalls."""
        return self._engine.backend.trace.record()

    @contextmanager
    def in_all_processes(self) -> Iterator[None]:
        """Open a scope around a backward pass that runs in all processes, even if it reaches no weight in this one."""
        averages = self._engine.stream.averages
        with self._calls.alone():
            if averages is not None:
                with self._story.at_work:
                    # a node before the first gradient may wait for other processes, too
                    averages.begin_pass()
            yield
        if averages is not None and averages.has_begun:
            self._story.add_up_with_others()

    def meet_processes(self, places: bool = True) -> None:
        """Have all processes use the first one's edits of weights, and place weights alike if asked.

        All of them call it before each training step, and wherever user code may have written to weights.
        """
        self._check_attached()
        self._story.placement.meet(places)

    def weights_changed(self) -> None:
        """Tell the engine that weights in CPU memory were written to: those on the GPU are sent again."""
        for unit in self._engine.window.units:
            self._engine.window.note_write(unit)

    def reset(self) -> None:
        """Recover from an exception in the middle of a step: nothing is in flight, and the next step can begin."""
        self._check_attached()
        self._story.abandon()

    def detach(self) -> None:
        """Give the module back as a plain one on the CPU, with no trace of the pipeline. Idempotent.

        This happens even while work is under way. An error of that work (a pending optimizer step, say), or an
        interrupt, is raised afterwards.
        """
        if self not in _attached or self.is_forked:
            return
        try:
            self._finish()
        finally:
            self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _finish(self) -> None:
        """Finish all work under way; drop it if that fails."""
        engine = self._parts
        # An interrupt may have ended the engine's own work, or a step, and torch does not report that.
        engine.at_work.abandon()
        optimizer_steps.depth = 0
        try:
            if self._calls in open_steps.models:
                with open_steps.ending():
                    pass
            engine.settle()
            if engine.graphs.scopes or engine.backward.running:
                self.reset()
        except BaseException:
            engine.drop_work()
            with suppress(Exception):
                self.reset()
            raise
        finally:
            engine.planner.abandon()

    def _give_back(self) -> None:
        """Make the module a plain one on the CPU, however far it was attached."""
        try:
            self._restore()
        except BaseException:
            self._parts.drop_work()
            # an interrupt may have come in the middle: the parts that it has skipped run now
            self._restore()
            raise

    def _restore(self) -> None:
        """Restore the module. Each part is idempotent, and is done also if another one fails."""
        engine = self._parts
        with ExitStack() as parts:  # the last one comes first
            parts.callback(_attached.discard, self)
            parts.callback(self.backend.close)
            # Streamed weights are there already. This moves buffers, other parameters, and states of quantized weights.
            parts.callback(self.module.to, HOST)
            parts.callback(engine.offloader.close)
            parts.callback(engine.saved.close)
            parts.callback(self.optimizers.remove_hooks)
            parts.callback(engine.uninstall)
            parts.callback(stop_listening, self.optimizers)
            parts.callback(atexit.unregister, self._end_threads)

    def _end_threads(self) -> None:
        """Finish all work before the interpreter ends: a thread that is still in torch then would abort the process."""
        if not self.is_forked:
            self.backend.close()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the module is attached in: it reads weights, and no more."""
        return self._parts.at_work.is_forked

    def summary(self) -> Summary:
        """Return the plan in numbers; `str()` of it is a table."""
        return Summary.of(self._engine)

    @property
    def arrangement(self) -> Arrangement:
        """The units, and the current places of their weights."""
        return self._parts.arrangement

    @property
    def _engine(self) -> Engine:
        """The parts that stream the module; it raises when the pipeline was detached."""
        self._check_attached()
        return self._parts

    def _check_attached(self) -> None:
        if self not in _attached:
            raise RuntimeError(
                "This pipeline was detached, and its module is a plain one again. To stream it, "
                "attach another pipeline: `superpipeline(module)`."
            )

    # ------------------------------------------------------------------------------------- for the Trainer's strategy

    @contextmanager
    def plain_classes(self) -> Iterator[None]:
        """Give modules their own classes: `configure_optimizers` may choose parameters by `type(module)`."""
        members = self._engine.arrangement.members
        for member in members:
            remove_gate(member)
        try:
            yield
        finally:
            for member in members:
                install_gate(member, self._calls)

    def keep_on_device(self, first_plan: WindowPlan) -> None:
        """Keep the units of this plan on the GPU from now on: CPU memory has no room for their optimizer state."""
        self._engine.first_plan = first_plan
        self._engine.place_weights()

    @property
    def budget(self) -> int | None:
        """GPU memory for weights, gradients on their way and activations; None if no limit is known."""
        return self._parts.device_budget


def _run_in_one_thread(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass in the thread that calls it, if any model is attached ([Note: one thread, one stream])."""
    if not _attached:
        return _run_backward(*args, **kwargs)
    # If this is in a backward pass, that one may catch an exception of this one, and go on.
    stories = [pipeline._story for pipeline in tuple(_attached) if not pipeline._story.backward.running]
    with torch.autograd.set_multithreading_enabled(False):
        try:
            return _run_backward(*args, **kwargs)
        except BaseException:
            for story in stories:
                story.fail()
            if not in_backward():
                # Nodes that were about to run wait in this thread, with all that their graph has
                # saved, until it runs another pass.
                leaf: Any = torch.zeros((), device="cpu", requires_grad=True)
                leaf.backward()
            raise


_run_backward = run_backward_by(_run_in_one_thread)
