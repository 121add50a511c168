"""Topology: the device of this process, and its communication with the other processes, if any.

Both strategies, the Trainer's and Fabric's, use this file.

With one process there is no launcher, as notebooks cannot use one, and no process group. The cluster environment is
not asked for ranks, as an interactive SLURM shell lacks the variables. With several processes, each has a device and
streams the model, as under Lightning's `DDPStrategy`; the engine averages gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partialmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from sp_lightning.pipeline import Pipeline, Processes
from sp_lightning.trainer import FabricNamespace, Namespace

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

T = TypeVar("T")


class ProcessesMixin:
    """The part of a strategy that deals with processes; a namespace's `ParallelStrategy` comes below it."""

    lightning: ClassVar[FabricNamespace]
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    _launcher: Any
    # Plain attributes that may be set, as in Lightning's own strategy for one device.
    global_rank = 0
    local_rank = 0
    node_rank = 0
    world_size = 1
    num_nodes = 1
    process_group_backend: str | None
    timeout: timedelta | None

    @property
    def root_device(self) -> torch.device:
        """The device that this process computes on."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes on each machine."""
        return len(self.parallel_devices or [None])

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process. If so, Lightning adds distributed samplers and refuses its tuners."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """The arguments of a distributed sampler that depend on this process; None if there is only one."""
        return {"num_replicas": self.world_size, "rank": self.global_rank} if self.is_distributed else None

    def set_world_ranks(self) -> None:
        """Set the ranks. The Trainer calls this when it has assigned devices, nodes and the environment."""
        environment = self.cluster_environment
        count = self.num_nodes * self.num_processes
        assert environment is not None
        # no effect if an external launcher has started the processes
        environment.set_world_size(count)
        launched = None  # None also if the number is unknown
        if environment.creates_processes_externally:
            # an interactive SLURM shell has no SLURM_NTASKS, and runs one process
            with suppress(KeyError):
                launched = environment.world_size()
        self.lightning.check(
            launched in (None, count),
            f"{type(environment).__name__} says that {launched} process(es) were launched, but "
            f"`devices={self.num_processes}, num_nodes={self.num_nodes}` asks for {count}, one per "
            "device. Launch as many (`torchrun --nproc-per-node`, `srun --ntasks`), or set "
            "`devices` and `num_nodes` accordingly.",
        )
        if count == 1:
            return
        self.local_rank, self.node_rank = environment.local_rank(), environment.node_rank()
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.global_rank, self.world_size = environment.global_rank(), environment.world_size()
        self.lightning.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            self._launcher = self.lightning.script_launcher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def setup_environment(self) -> None:
        """Set up the device, and join the process group."""
        super().setup_environment()  # type: ignore[misc]
        if not self.is_distributed:
            return
        started = f"{self.world_size} processes train one model, {self.num_processes} on this machine, one per device"
        self.lightning.info(f"superpipeline: {started}. For a single one, set `devices=1`.")
        self.lightning.reset_seed()
        on_device = dist.Backend.default_device_backend_map.get(self.root_device.type, "gloo")
        self.lightning.init_process_group(
            self.cluster_environment, self.process_group_backend or on_device, timeout=self.timeout
        )

    def processes_of_a_model(self) -> Processes | None:
        """Return the engine's handle to all processes that train one model; None if there is only one."""
        timeout = self.timeout or default_pg_timeout
        return Processes(self.num_processes, timeout) if self._is_connected else None

    @property
    def _is_connected(self) -> bool:
        return self.is_distributed and dist.is_initialized()

    def all_reduce(self, tensor: T, group: Any | None = None, reduce_op: Any = "mean") -> T:
        """Reduce a tensor over processes; anything else stays as it is."""
        if not (self._is_connected and isinstance(tensor, Tensor)):
            return tensor
        return cast("T", self.lightning.reduce(tensor, group, reduce_op=reduce_op))

    reduce = all_reduce  # as the Trainer calls it

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of each process."""
        if not self._is_connected:
            return tensor
        return cast("Tensor", self.lightning.all_gather(tensor, group, sync_grads))

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object that the process `src` has."""
        if not self._is_connected:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def barrier(self, name: str | None = None) -> None:
        """Wait until all processes have reached this point."""
        if self._is_connected:
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)


def meet_before_hooks(trainer: Any, lightning: Namespace) -> None:
    """Have processes wait for each other before hooks that may write to weights: others may still compute with them.

    Raises:
        MisconfigurationException: A process may even skip an evaluation.
    """
    option = "allow_zero_length_dataloader_with_multiple_devices"
    allows = any(getattr(holder, option, False) for holder in (trainer.lightning_module, trainer.datamodule))
    lightning.check(
        not allows,
        f"`{option}=True` lets a process skip an evaluation, and the others would wait for it. "
        "Leave it False, and give each process a batch, or an IterableDataset that may be empty.",
    )
    names = ["on_train_batch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end"]
    hooks = dict.fromkeys(names, _end_step)
    trainer.callbacks.insert(0, lightning.lambda_callback(**hooks))


def _end_step(trainer: Any, *_: Any) -> None:
    trainer.strategy.meetings.end_step(trainer.strategy.pipeline)


class Meetings:
    """The meetings before a step, in which processes that train one model get the first one's changes.

    The first one's buffers are sent to the others, as under DDP.

    Args:
        processes: All of them; None if there is only one, which meets no other.
    """

    def __init__(self, processes: Processes | None = None) -> None:
        self.processes = processes
        # whether DDP would send the first process's buffers before the next step
        self._buffers_due = False
        self._passes = 0  # the number of backward passes when processes last met before a step
        self.meeting_due = True  # whether weights may have changed, so that all have to see them

    @property
    def follows(self) -> bool:
        """Whether another process of this machine owns the weights and the optimizer's state."""
        return self.processes is not None and not self.processes.box.is_keeper

    def begin_run(self, trains: bool) -> None:
        """Prepare for steps. Buffers are shared and gradients averaged where all processes see equally many batches."""
        self._buffers_due = trains
        if self.processes is not None:
            self.processes.trains = trains

    def weights_may_change(self) -> None:
        """Have all processes see in the next step all that user code writes to the first one's weights before."""
        if self.processes is not None:
            self.processes.copies_may_differ = True
        self.meeting_due = True

    def begin_step(self, pipeline: Pipeline) -> None:
        """Have all processes see the first one's changes: in each training step, and the first of an evaluation."""
        self.share_buffers(pipeline)
        # an optimizer may have stepped, or callbacks written to weights
        self.meeting_due |= torch.is_grad_enabled()
        self.meet(pipeline)

    def end_step(self, pipeline: Pipeline | None) -> None:
        """Wait for the others after steps without a backward pass, in which processes wait for each other.

        They have met in the first step of an evaluation, so a process without a batch does so now.
        """
        if self.processes is not None and pipeline is not None:
            if self.meeting_due:
                self.begin_step(pipeline)
            if self.processes.passes == self._passes:
                self.share_weights(pipeline)

    def share_weights(self, pipeline: Pipeline | None) -> None:
        """Wait until no process computes, and have all see user code's changes of the first one's weights."""
        if self.processes is not None and pipeline is not None:
            self.processes.copies_may_differ = True
            pipeline.meet_processes(places=False)

    def share_buffers(self, pipeline: Pipeline) -> None:
        """Give all processes the first one's buffers, before each forward after a training forward, as DDP does."""
        if self.processes is not None:
            if self._buffers_due:
                self.processes.broadcast(pipeline.module.buffers())
            averages = self.processes.averages and self.processes.trains
            self._buffers_due = averages and torch.is_grad_enabled()

    def meet(self, pipeline: Pipeline) -> None:
        """Have all processes see the first one's changes of weights, if there may be any: at least after a backward."""
        processes = self.processes
        if processes is not None and (self.meeting_due or processes.passes != self._passes):
            pipeline.meet_processes(places=processes.trains)
            self.meeting_due = False
            self._passes = processes.passes

    @contextmanager
    def _switched_off(self, flag: Literal["averages", "trains"]) -> Iterator[None]:
        """Open a scope in which processes do not average, or do not train."""
        processes = self.processes
        if processes is None:
            yield
            return
        before = getattr(processes, flag)
        setattr(processes, flag, False)
        try:
            yield
        finally:
            setattr(processes, flag, before)

    # a scope for backward passes after which averages are not complete yet
    without_averages = partialmethod(_switched_off, "averages")
    # a scope for an evaluation step, whose backward passes are each process's own, as in DDP
    evaluating = partialmethod(_switched_off, "trains")
