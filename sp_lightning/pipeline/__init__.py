"""The engine: streams a module's units between host and device. It imports torch, and nothing from Lightning."""

from sp_lightning.pipeline.calls.gates import open_steps
from sp_lightning.pipeline.engine import Engine, Planner
from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend
from sp_lightning.pipeline.lanes.backend import Backend, is_out_of_memory
from sp_lightning.pipeline.lanes.devices import HostBackend
from sp_lightning.pipeline.lanes.lanes import Kind, Lane, Recording, Span
from sp_lightning.pipeline.optimizer.kinds import Afterwards
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.pipeline import Pipeline
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.stats import Progress, Stats, Work, readable_bytes
from sp_lightning.pipeline.summary import Summary, as_table
from sp_lightning.pipeline.window.places import WindowPlan

__all__ = [
    "AcceleratorBackend",
    "Afterwards",
    "Backend",
    "Engine",
    "HostBackend",
    "Kind",
    "Lane",
    "Pipeline",
    "PipelineOptions",
    "Planner",
    "Processes",
    "Progress",
    "Recording",
    "Span",
    "Stats",
    "Summary",
    "WindowPlan",
    "Work",
    "as_table",
    "available_host_memory",
    "is_out_of_memory",
    "open_steps",
    "readable_bytes",
]
