"""Loading without a peak: what a model takes while it is attached is what it takes afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sp_lightning.pipeline.host_memory import release

from .processes import Fork, forks

LAYERS = {"num_hidden_layers": 32, "hidden_size": 448, "intermediate_size": 1344, "num_attention_heads": 8}
CONFIG = {"vocab_size": 1024, "num_key_value_heads": 8, "use_cache": False, **LAYERS}

IMPORTS = """
import functools, gc, json, os, threading, time
import lightning, sp_lightning, torch, transformers.models.llama.modeling_llama
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
"""

FITTING = f"""{IMPORTS}
way, folder, config = json.loads(os.environ["FITTING"])

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.004)

@torch.no_grad()
def fill(module):
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.fill_(1)

class Model(lightning.LightningModule):
    def configure_model(self):
        if way == "from_pretrained":
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        else:
            with torch.device("meta"):
                self.model = LlamaForCausalLM(LlamaConfig(**config))
            for part in self.model.modules():  # most of these have no `reset_parameters`
                part.reset_parameters = functools.partial(fill, part)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self):
        highest = peak
        print(json.dumps(dict(peak=highest - base, stays=resident() - base)))

    def training_step(self, batch, batch_idx):
        return None

gc.collect()
base = peak = resident()
threading.Thread(target=watch, daemon=True).start()
trainer = lightning.Trainer(accelerator="cpu", strategy="superpipeline", max_steps=1, barebones=True)
trainer.fit(Model(), [0])
"""


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fork]:
    with forks(IMPORTS, tmp_path_factory.mktemp("forks")) as fork:
        yield fork


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
@pytest.mark.parametrize("way", ["from_pretrained", "meta"])
def test_attaching_has_no_peak(way: str, tmp_path: Path, fork: Fork) -> None:
    """Weights are moved one by one, also from a file that is mapped, whose pages would stay until the last one."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if way == "from_pretrained":
        model.to_empty(device="cpu").save_pretrained(tmp_path)
    status, printed, said = fork(FITTING, FITTING=json.dumps([way, str(tmp_path), CONFIG]))
    assert status == 0, said[-3000:]
    taken = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    # what was imported before may be given back meanwhile, too
    assert 0.9 * weights <= taken["stays"] <= 1.2 * weights
    assert taken["peak"] <= 1.05 * taken["stays"]


def test_what_was_released_can_be_read_again(tmp_path: Path) -> None:
    """Also what this process has written into it, which is not in the file."""
    torch.save(torch.arange(2**19, dtype=torch.float32), tmp_path / "file")
    tensor = torch.load(tmp_path / "file", mmap=True)
    tensor[5:9] = -1.0
    before = tensor.clone()
    own = before.clone()
    release([tensor, own])
    assert torch.equal(tensor, before)
    assert torch.equal(own, before)
