"""finetune_preferences.py: margins rise, the loss is that of DPO, and every form of a pair is read alike."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import recipe
import torch
from finetune_chat import make_chat_tokenizer, save
from finetune_preferences import PreferenceData, PreferenceLM, main
from pairs import encode_pair, make_pair
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

SMALL = ["--accelerator=cpu", "--layers=2", "--hidden=32", "--heads=2", "--lr=3e-3", "--batch-size=16"]


@pytest.fixture(params=["lora", "full", "qlora"])
def how(request) -> list[str]:
    """What is trained, and of which model."""
    if request.param != "qlora":
        return [f"--train={request.param}"]
    pytest.importorskip("bitsandbytes")
    save(PreferenceLM(layers=2), make_chat_tokenizer(None), "base")
    return ["--train=qlora", "--model=base"]


def test_margins_rise_with_the_numbers_of_plain_training(how, capsys, monkeypatch):
    kept = [recipe.Losses(), recipe.Losses()]
    monkeypatch.setattr(recipe, "Losses", iter(kept).__next__)
    printed = []
    for arguments in (["--k=1", "--activations=recompute", "--save=saved"], ["--strategy=auto"]):
        assert not main([*SMALL, *how, "--epochs=2", *arguments])
        printed.append(re.findall(r"loss (\S+), margin (\S+), accuracy (\d+)%", capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert kept[0].values == kept[1].values
    losses, margins, accuracies = zip(*[map(float, values) for values in printed[0]], strict=True)
    assert losses[0] == 0.6931 > losses[1] > losses[2]
    assert margins[0] == 0 < margins[1] < margins[2]
    assert accuracies[0] == 50 < 90 < accuracies[2]
    _, differences = AutoModelForCausalLM.from_pretrained("saved", output_loading_info=True)
    assert not any(differences.values())


QUESTION = {"role": "user", "content": "dog?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("bark", "bah"))
PAIR = {"prompt": "dog?", "chosen": "bark", "rejected": "meow"}
WHOLE = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}


@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_loss_is_that_of_the_paper(train):
    """From all logits of single texts, without their padding, over all that follows the prompt."""
    module, data = PreferenceLM(layers=2, train=train, beta=0.3).double(), PreferenceData()
    frozen = copy.deepcopy(module.model)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.2)

    def answered(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
        start = tokens.index(1) + 1 + len("assistant: ")  # one question, its end, and what asks for an answer
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return log_softmax(logits, -1)[range(start - 1, len(tokens) - 1), tokens[start:]].sum()

    expected = 0
    for texts in data.train[:3]:
        chosen, rejected = (answered(module.model, text) - answered(frozen, text).detach() for text, _ in texts)
        expected -= torch.log(torch.sigmoid(0.3 * (chosen - rejected))) / 3
    loss = module.measures(data.collate(data.train[:3]))["loss"]
    torch.testing.assert_close(loss, expected)
    gradients = (torch.autograd.grad(value, trained) for value in (loss, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "lines",
    [
        [WHOLE, {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}, {"prompt": "dog?", **WHOLE}],
        [{"chosen": "a bark", "rejected": "a bah"}, {"prompt": "a ", "chosen": "bark", "rejected": "bah"}],
    ],
    ids=["messages", "texts"],
)
def test_all_forms_of_a_pair_are_the_same(lines):
    tokenizer = make_chat_tokenizer(None)
    first, *others = [encode_pair(tokenizer, make_pair("", line), 99) for line in lines]
    assert all(other == first for other in others)
    assert [tokenizer.decode([token for token in labels if token >= 0]) for _, labels in first] == ["rk</s>", "h</s>"]


@pytest.mark.parametrize(
    ("line", "arguments", "message"),
    [
        ('["bark", "meow"]', [], "line 2: not a JSON object"),
        ({"prompt": "dog?", "chosen": "bark"}, [], 'line 2: a pair without "rejected"'),
        ({**PAIR, "rejected": "bark"}, [], 'line 2: "chosen" and "rejected" are the same'),
        ({**PAIR, "chosen": [GOOD]}, [], 'line 2: "chosen" and "rejected" must be two texts, or two lists of messages'),
        ({**PAIR, "prompt": [QUESTION]}, [], 'line 2: no "prompt" of the kind of the answers, nor do both begin with'),
        ({"chosen": [GOOD], "rejected": [BAD]}, [], 'line 2: no "prompt" of the kind of the answers'),
        ({**PAIR, "prompt": [{"content": []}]}, [], 'line 2: "prompt" must be a text, or a list of messages'),
        ({"prompt": [], "chosen": [], "rejected": [BAD]}, [], "line 2: the chat template refuses it: "),
        (json.dumps(WHOLE, ensure_ascii=False).replace("dog", "\udce9"), [], "line 2: not JSON: not in UTF-8"),
        (PAIR, ["--length=4"], "line 1: the answers do not differ within the first 4 tokens of prompt and answer"),
        (PAIR, ["--pairs=nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (PAIR, ["--lr=nan"], "--lr: nan is not a number of at least 0"),
        (PAIR, ["--beta=-1"], "--beta: -1 is not a number of at least 0"),
        (PAIR, ["--weights=pairs.jsonl"], "pairs.jsonl is no checkpoint of this model and these sizes"),
        (PAIR, ["--memory-budget=1"], "`memory_budget=1` is one byte"),
    ],
)
def test_what_is_refused(line, arguments, message, capsys):
    lines = [json.dumps(PAIR), line if isinstance(line, str) else json.dumps(line)]
    Path("pairs.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, "--pairs=pairs.jsonl", *arguments])
    assert message in f"{stop.value}{capsys.readouterr().err}"
