"""The engine: streams a module's units between host and device. It imports torch, and nothing from Lightning."""

from sp_lightning.pipeline.calls.gates import open_steps as open_steps
from sp_lightning.pipeline.engine import Engine as Engine
from sp_lightning.pipeline.engine import Planner as Planner
from sp_lightning.pipeline.host_memory import available_host_memory as available_host_memory
from sp_lightning.pipeline.lanes.backend import Backend as Backend
from sp_lightning.pipeline.lanes.device_memory import is_out_of_memory as is_out_of_memory
from sp_lightning.pipeline.lanes.devices import AcceleratorBackend as AcceleratorBackend
from sp_lightning.pipeline.lanes.devices import HostBackend as HostBackend
from sp_lightning.pipeline.lanes.lanes import Kind as Kind
from sp_lightning.pipeline.lanes.lanes import Lane as Lane
from sp_lightning.pipeline.lanes.lanes import Recording as Recording
from sp_lightning.pipeline.lanes.lanes import Span as Span
from sp_lightning.pipeline.optimizer.kinds import Afterwards as Afterwards
from sp_lightning.pipeline.options import ActivationPolicy as ActivationPolicy
from sp_lightning.pipeline.options import PipelineOptions as PipelineOptions
from sp_lightning.pipeline.pipeline import Pipeline as Pipeline
from sp_lightning.pipeline.processes.distributed import Processes as Processes
from sp_lightning.pipeline.stats import Progress as Progress
from sp_lightning.pipeline.stats import Stats as Stats
from sp_lightning.pipeline.stats import Work as Work
from sp_lightning.pipeline.stats import readable_bytes as readable_bytes
from sp_lightning.pipeline.summary import Summary as Summary
from sp_lightning.pipeline.summary import as_table as as_table
from sp_lightning.pipeline.window.places import WindowPlan as WindowPlan
