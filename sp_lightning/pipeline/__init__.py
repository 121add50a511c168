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

[Note: one thread, one stream]
One thread at a time computes with a model: its forward, its backward, and the `step()` of its optimizer. Within a step,
all units compute on one stream of the device. Window, handles, gradients and counters rest on this. Backward runs nodes
in the reverse order of their creation, so when it reaches a unit, everything that later units have launched comes
before on that stream. A copy that waits for the stream may therefore overwrite their places.

Autograd on its own would use one thread for the nodes of each device and the calling thread for those of the CPU. Where
several units return CPU tensors, one thread would evict a unit whose weights the other is about to read. So while any
model is attached, every backward pass runs in the thread that calls it (`_run_in_one_thread` in pipeline.py). A setting
of autograd does that. It belongs to a thread, and `torch.inference_mode` changes it, so it is made for each pass.

Breaking the axiom raises an error: a second thread (`EngineAtWork.refuse_others`), a backward for which autograd uses
several threads (`BackwardPass.note_sign`), and another stream (`Backend.check_stream`) for a unit, a gradient, or a
tensor that is offloaded. With `debug`, each weight that backward unpacks is a check of the thread, too.

The engine's own threads access memory only through jobs and copies, which have an order of their own ([Note: ordering
of copies] in lanes/backend.py). Any thread may read weights, which the guard answers, and may drop a graph.
"""

from sp_lightning.pipeline.calls.gates import open_steps
from sp_lightning.pipeline.engine import Engine, Planner
from sp_lightning.pipeline.host_memory import available_host_memory
from sp_lightning.pipeline.lanes.accelerator import AcceleratorBackend, HostBackend
from sp_lightning.pipeline.lanes.backend import Backend, is_out_of_memory
from sp_lightning.pipeline.lanes.lanes import Kind, Lane, Recording, Span
from sp_lightning.pipeline.optimizer.kinds import Afterwards
from sp_lightning.pipeline.options import PipelineOptions
from sp_lightning.pipeline.pipeline import Pipeline, Summary, as_table
from sp_lightning.pipeline.placing.places import WindowPlan
from sp_lightning.pipeline.processes.distributed import Processes
from sp_lightning.pipeline.stats import Progress, Stats, Work, readable_bytes

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
