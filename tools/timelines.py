"""Record timelines of one model with steps of several sizes, the engine's choices, and the time that threads worked.

    python tools/timelines.py --workload llama-3.1-8b-24g-8k --thousands 16 4 1 --output FOLDER
    python tools/timelines.py --workload toy-lm-bf16 --thousands 2 1 --output FOLDER    # any laptop

One run trains with steps of so many thousand tokens, in this order, the first size for a few more steps because the
engine plans in them; then with those of `--unclipped` without clipping. Of each, all but the first recorded step are
drawn (`<thousands>k.svg`, and `<thousands>k.json` for ui.perfetto.dev); what they measured is written to
`timelines.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[1]
# contain the suite, the examples, the package
FOLDERS = [str(ROOT / folder) for folder in ("examples/benchmarks", "examples", ".")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

from suite import host_memory, machine  # noqa: E402
from suite.module import BenchModule, Clock  # noqa: E402
from suite.picture import draw_timeline  # noqa: E402
from suite.sets import WORKLOADS  # noqa: E402
from suite.systems import make_system  # noqa: E402
from suite.weights import build_network  # noqa: E402
from suite.workloads import Workload  # noqa: E402

from sp_lightning.pipeline import Pipeline, Recording  # noqa: E402
from sp_lightning.timeline import break_down, write_timeline  # noqa: E402

_RECORDED = 4  # steps of each size; the first of them is left out
_PLANNED = 4  # more steps of the first size


class Observer(L.Callback):
    """Records the last steps of each size.

    Args:
        sizes: Thousands of tokens in a step.
        clipped: Of how many of them the gradients are clipped.
        steps: Steps of each size.
        folder: Where to write to.
        about: What is written with what was recorded.
    """

    def __init__(self, sizes: list[int], clipped: int, steps: int, folder: Path, about: dict[str, Any]) -> None:
        self._about = about
        self._sizes = sizes
        self._clipped = clipped
        self._steps = steps
        self._folder = folder
        self._scope = ExitStack()
        self._recording: Recording | None = None
        self._before: dict[str, Any] = {}
        self._began = 0.0
        self.found: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        """Begin or end a recording."""
        end = _PLANNED + self._steps * (len(self.found) + 1)
        if index == end:
            self._finish(trainer)
            end += self._steps
            if len(self.found) == self._clipped:
                trainer.gradient_clip_val = None
        if index == end - _RECORDED:
            pipeline = _pipeline(trainer)
            self._before = {"stats": dict(vars(pipeline.stats)), "threads": thread_seconds()}
            self._began = time.perf_counter()
            self._recording = self._scope.enter_context(pipeline.record())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the last recording."""
        self._finish(trainer)

    def _finish(self, trainer: L.Trainer) -> None:
        self._scope.close()
        recording, pipeline, size = self._recording, _pipeline(trainer), self._sizes[len(self.found)]
        assert recording is not None
        seconds, threads = time.perf_counter() - self._began, thread_seconds()
        recording.steps = recording.steps[1:]
        counted = {
            name: value - self._before["stats"][name]
            for name, value in vars(pipeline.stats).items()
            if isinstance(value, int) and name in self._before["stats"]
        }
        plan = pipeline.summary()
        self.found.append(
            {
                "thousands": size,
                "clipping": trainer.gradient_clip_val,
                "recorded_steps": _RECORDED,
                "seconds": seconds,
                **break_down(recording).metrics(),
                "plan": {name: getattr(plan, name) for name in ("units", "k", "pinned")},
                "counted": counted,
                "thread_seconds": {
                    name: used - self._before["threads"].get(name, 0.0) for name, used in threads.items()
                },
                "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            }
        )
        without = "" if trainer.gradient_clip_val else "-unclipped"
        caption = f"{size}K tokens{without}, k={plan.k}, {plan.device}"
        write_timeline(recording, self._folder / f"{size}k{without}.json", caption=caption)
        drawn = draw_timeline(recording, caption)
        (self._folder / f"{size}k{without}.svg").write_text(drawn, encoding="utf-8")
        self.write()  # at once, as a lease may end at any time

    def write(self) -> None:
        """Write what has been found so far."""
        (self._folder / "timelines.json").write_text(
            json.dumps({**self._about, "sizes": self.found}, indent=1), encoding="utf-8"
        )


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of each thread of this process, where Linux counts them."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            spent = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # the thread has ended, or the kernel does not count
            continue
        found[f"{name} {task.name}"] = spent
    return found


def _pipeline(trainer: L.Trainer) -> Pipeline:
    pipeline = trainer.strategy.pipeline  # type: ignore[attr-defined]
    assert isinstance(pipeline, Pipeline)
    return pipeline


def batches(workload: Workload, sizes: list[int], steps: int) -> list[dict[str, Tensor]]:
    """Return the batches of the run, in pinned memory where there is a device."""
    generator, found = torch.Generator().manual_seed(1), []
    for size in sizes:
        batch = workload.batch(size * 1024 // workload.items_per_sample, generator)
        found += [{name: _pinned(tensor) for name, tensor in batch.items()}] * (steps if found else steps + _PLANNED)
    return found


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def main() -> None:
    """Train, and write what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="llama-3.1-8b-24g-8k", metavar="NAME")
    parser.add_argument("--thousands", type=int, nargs="+", default=[16, 4, 1], help="tokens in a step")
    parser.add_argument("--unclipped", type=int, nargs="*", default=[], help="the same, after that without clipping")
    parser.add_argument("--steps", type=int, default=5, help="steps of each size")
    parser.add_argument(
        "--host-gigabytes", type=int, default=0, help="host memory that the machine gives once it is used"
    )
    parser.add_argument("--revision", metavar="COMMIT", help="the measured commit, if there is no git repository")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    workload = replace(WORKLOADS[options.workload], samples=1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda" and workload.device_limit is not None:
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, workload.device_limit / total), device)
    grown = host_memory.grow(options.host_gigabytes * 10**9)
    L.seed_everything(0, verbose=False)
    began = time.perf_counter()
    system = make_system("superpipeline")
    module = BenchModule(build_network(workload).train(), workload, system)
    built = time.perf_counter() - began
    sizes: list[int] = options.thousands + options.unclipped
    about = {
        "workload": options.workload,
        "precision": workload.precision,
        "machine": machine.describe(options.revision),
        "host_grown": grown,
        "build_seconds": built,
    }
    observer, clock = Observer(sizes, len(options.thousands), options.steps, options.output, about), Clock(device)
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=len(sizes) * options.steps + _PLANNED,
        gradient_clip_val=workload.clipping,
        precision=workload.precision,  # type: ignore[arg-type]
        strategy="superpipeline",
        callbacks=[clock, observer],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches(workload, sizes, options.steps), batch_size=None))
    about |= {"run_seconds": time.perf_counter() - began, "values": clock.values(), "clock": clock.seconds()}
    observer.write()
    for found in observer.found:
        print(json.dumps({name: value for name, value in found.items() if name != "thread_seconds"}))


if __name__ == "__main__":
    main()
