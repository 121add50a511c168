"""The engine: streams a module's units between host and device. It imports torch, and nothing from Lightning.

    Pipeline                          what users hold: attach, detach, steps
    |-- Calls                         scopes of steps, and each call of a module (calls/gates.py)
    |   `-- Story                     the parts' work at each event of a step
    |       |-- PlacementPolicy       decides when weights get other places
    |       |-- RunningCall           a call under way
    |       |-- Graphs                graphs that wait for their backward
    |       `-- BackwardPass          the backward under way
    `-- Engine                        the parts, and how weights are placed
        |-- Arrangement               units of a module tree, and where their weights lie
        |   |-- Unit -- Presence      weights that stream as a whole, and their part on the device
        |   |   |-- Member -- Entry   a module whose call needs the unit, and its places for weights
        |   |   `-- Segment           host memory of weights that are sent in one copy
        |   |       `-- Weight -- Twin -- leaf
        |   `-- Learned               findings of past steps
        |-- Window -- Order           which units are on the device, and which come next
        |-- Activations               policies for saved tensors: SavedTensors, UnitCall, Offloader
        |-- GradientStream            from the leaf's hook to the host: SegmentGradients, Routes, Averages
        |-- Optimizers -- UnitSteps   steps unit by unit: EarlyStep, Visits, Clipping
        |-- Guard -- HostParameter    accesses to masters outside of their units
        |-- StayingUnits              units that stay on the device with all their state
        `-- Backend -- Trace          copies, events and work on the host of one device

calls/story.py tells what each part does at each event of a step.
"""

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
from sp_lightning.pipeline.placing.places import WindowPlan
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.stats import Progress, Stats, Work, readable_bytes
from sp_lightning.pipeline.summary import Summary, as_table

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
