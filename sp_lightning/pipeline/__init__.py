"""The engine: streams a module's units between host and device. It imports torch, and nothing from Lightning."""

from sp_lightning.pipeline.engine import Engine, Planner
from sp_lightning.pipeline.gradients.averaging import Replicas
from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend
from sp_lightning.pipeline.lanes.backend import Backend, is_out_of_memory
from sp_lightning.pipeline.lanes.emulated import HostBackend
from sp_lightning.pipeline.lanes.lanes import Kind, Lane, Recording, Span
from sp_lightning.pipeline.layout.learned import WindowPlan
from sp_lightning.pipeline.optimizer.optimizers import Afterwards
from sp_lightning.pipeline.options import ActivationPolicy, PipelineOptions, UnitPolicy
from sp_lightning.pipeline.pipeline import Pipeline
from sp_lightning.pipeline.sizes import readable_bytes, readable_seconds
from sp_lightning.pipeline.stats import Stats
from sp_lightning.pipeline.summary import Summary, as_table

__all__ = [
    "AcceleratorBackend",
    "ActivationPolicy",
    "Afterwards",
    "Backend",
    "Engine",
    "HostBackend",
    "Kind",
    "Lane",
    "Pipeline",
    "PipelineOptions",
    "Planner",
    "Recording",
    "Replicas",
    "Span",
    "Stats",
    "Summary",
    "UnitPolicy",
    "WindowPlan",
    "as_table",
    "available_host_memory",
    "is_out_of_memory",
    "readable_bytes",
    "readable_seconds",
]
