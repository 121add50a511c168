"""finetune_chat.py: it learns answers, no chat of a row sees another, and what is saved is what was learned."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from chats import IGNORED, chat_of, encode, prompt, read_chats
from data_files import Skipped
from finetune_chat import TEMPLATE, ChatData, ChatLM, main, make_chat_tokenizer, save
from finetune_lm import make_tokenizer
from lora_lm import save_adapters
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, GPT2Config, LlamaConfig, MambaConfig

SMALL = ["--accelerator=cpu", "--layers=2", "--hidden=64", "--lr=4e-3", "--batch-size=1", "--length=128"]
SAYS = {"dog": "bark", "cat": "meow", "cow": "low", "bee": "hum"}


def turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def run(capsys, *arguments: str) -> str:
    """What a run prints about losses and answers."""
    assert not main([*SMALL, *arguments])
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(line.partition(" steps in")[0] for line in lines if re.search("^Epoch .*: v|->|^Loss", line))


def logits(model: torch.nn.Module, tokens: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False, **inputs).logits


@pytest.fixture
def file():
    """A file of chats with two questions each, none of them asked twice."""
    words = [f"{first} %s{last}" for first in ("a", "the") for last in "?!.:;,-="]
    turns = [turn(question % animal, sound) for question in words for animal, sound in SAYS.items()]
    random.shuffle(turns)
    lines = [json.dumps({"messages": [*one, *other]}) for one, other in zip(turns[::2], turns[1::2], strict=True)]
    Path("chats.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    return "chats.jsonl"


@pytest.fixture(params=["full", "lora", "qlora"])
def how(request) -> dict[str, str]:
    """What is trained, and of which model."""
    if request.param == "qlora":
        pytest.importorskip("bitsandbytes")
    save(ChatLM(layers=2), make_chat_tokenizer(None), "base")
    return {"train": request.param, "model": "base"}


def test_answers_are_learned(capsys, file):
    output = run(capsys, f"--chats={file}", "--epochs=6", "--schedule=cosine", "--k=1")
    losses = [float(value) for value in re.findall(r"loss (\d\.\d+)", output)]
    assert len(losses) == 6
    assert losses[-1] < 0.2 * losses[0]
    answers = re.findall(r"'\w+ (\w+).*' -> '(\w+)'", output)[-3:]
    assert answers == [(animal, SAYS[animal]) for animal, _ in answers]


def test_the_numbers_are_those_of_plain_training(capsys, file, how):
    arguments = [f"--chats={file}", "--epochs=1", "--no-resume", *(f"--{name}={value}" for name, value in how.items())]
    output = run(capsys, *arguments)
    assert len(output.splitlines()) == 5
    assert output == run(capsys, *arguments, "--strategy=auto")


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_mixture_of_experts(capsys, file, train):
    """With the numbers of plain training; adapters are on attention alone, and are written for peft by its names."""
    arguments = [f"--chats={file}", "--epochs=1", "--experts=4", "--hidden=32", f"--train={train}"]
    adapters = ["--save-adapters=mine"] if train == "lora" else []
    output = run(capsys, *arguments, *adapters, "--k=1")
    assert output == run(capsys, *arguments, "--strategy=auto")
    if adapters:
        config = json.loads(Path("mine/adapter_config.json").read_text(encoding="utf-8"))
        assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_what_is_saved_is_what_was_learned(how):
    module, tokenizer = ChatLM(**how), make_chat_tokenizer(None)
    for parameter in module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(3, 259, (2, 9))
    expected = logits(module.model, tokens)
    save(module, tokenizer, "saved")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained("saved"), tokens), expected)
    chat = turn("the dog?", "bark")
    assert prompt(AutoTokenizer.from_pretrained("saved"), chat) == prompt(tokenizer, chat)


def test_peft_loads_the_adapters():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    save(ChatLM(layers=2), make_chat_tokenizer(None), "base")
    module = ChatLM("base", train="lora", alpha=24)
    for parameter in module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    Path("mine").mkdir()
    save_adapters(module.model, "mine", "base", rank=8, alpha=24)
    tokens = torch.randint(3, 259, (2, 9))
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained("mine")
    torch.testing.assert_close(logits(loaded, tokens), logits(module.model, tokens))


SIZE = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 1}


CONFIGS = [GPT2Config(**SIZE), LlamaConfig(**SIZE), Gemma3TextConfig(**SIZE, **WINDOW, head_dim=8)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_chat_does_not_see_the_others_of_its_row(file, config, attention):
    """Its logits are those of the chat alone."""
    data = ChatData(file)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    packed = data.collate(data.train[:2])
    together = logits(model, packed["tokens"], position_ids=packed["positions"])
    for row, found in zip(data.train, together, strict=False):
        alone = [logits(model, torch.tensor([tokens]))[0] for tokens, _ in row]
        assert len(alone) > 2
        torch.testing.assert_close(found[: sum(map(len, alone))], torch.cat(alone))


def test_answers_alone_are_learned():
    def learned(*chat: dict[str, str]) -> list[list[str]]:
        texts = encode(tokenizer, list(chat))
        return [[tokenizer.decode([token for token in part if token != IGNORED]) for part in text] for text in texts]

    tokenizer = make_chat_tokenizer(None)
    system, first, second = {"role": "system", "content": "Hi."}, turn("dog?", "Hm.bark"), turn("cat?", "Hm.meow")
    whole = "system: Hi.</s>user: dog?</s>assistant: Hm.bark</s>user: cat?</s>assistant: Hm.meow</s>"
    assert learned(system, *first, *second, turn("bee?", "")[0]) == [[whole, "Hm.bark</s>Hm.meow</s>"]]
    # With a template that leaves out thoughts of earlier turns, each answer is learned after what asks for it.
    short = "(message['content'] if loop.last else message['content'].split('.')[-1])"
    tokenizer.chat_template = TEMPLATE.replace("message['content']", short)
    later = "user: dog?</s>assistant: bark</s>user: cat?</s>assistant: Hm.meow</s>"
    assert learned(*first, *second) == [[whole[15:51], "Hm.bark</s>"], [later, "Hm.meow</s>"]]
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="leaves out messages of the role 'system'"):
        learned(system, *first)


ALPACA = {"instruction": "dog?", "input": "a big one", "output": "bark", "system": "Hi."}
ASKED = [{"role": "system", "content": "Hi."}, *turn("dog?\n\na big one", "bark")]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": NAMES[message["role"]], "value": message["content"]} for message in ASKED]


@pytest.mark.parametrize("found", [{"messages": ASKED}, {"conversations": SHAREGPT}, ALPACA], ids=list)
def test_every_form_of_a_chat_is_read_alike(found):
    """In lines, and in a list."""
    Path("lines.jsonl").write_text(f"{json.dumps(found)}\n" * 2, encoding="utf-8")
    Path("list.json").write_text(json.dumps([found] * 2, indent=1), encoding="utf-8")
    chats = [messages for name in ("lines.jsonl", "list.json") for _, messages in read_chats(name, Skipped())]
    assert chats == [ASKED] * 4
    assert chat_of("", {**ALPACA, "input": "", "system": None}) == turn("dog?", "bark")


def test_bad_lines_are_skipped_and_counted(capsys):
    """What is no JSON, no chat, or has no place in the template; the first reasons are shown."""
    tool = {"messages": [{"role": "tool", "content": "2"}, *turn("dog?", "bark")]}
    bad = ['{"messages": [', '{"text": "dog"}', json.dumps({"messages": []}), json.dumps(tool)]
    lines = [*[GOOD] * 20, *bad]
    random.shuffle(lines)
    Path("chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = ChatData("chats.jsonl")
    assert sum(len(row) for rows in (data.train, data.val) for row in rows) == 20
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("chats.jsonl: 20 used (4 skipped: chats.jsonl, line ")
    assert said.endswith("; ...)")


GOOD = json.dumps({"messages": turn("dog?", "bark")})
IS_NEW = transformers.__version__ >= "5"  # Mamba has a loss of its own before


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        ([GOOD, '{"messages": [', ""], [], "chats.jsonl, line 2: not JSON: "),
        ([GOOD, '{"text": "dog"}'], [], 'line 2: a chat has "messages", "conversations" (ShareGPT), or "instruction"'),
        (["[", GOOD, "]"], [], "too few lines"),
        (["[", f"{GOOD},", "oh]"], [], "chats.jsonl, line 3: not JSON: Expecting value"),
        (["[3, 4]"], [], "chats.jsonl, entry 1: not a JSON object"),
        (['{"conversations": [{"from": "gpt"}]}'], [], 'line 1: "conversations" must be a list of messages'),
        (['{"instruction": 1, "output": "a"}'], [], 'line 1: "instruction", "input" and "output" must be texts'),
        ([GOOD, '{"messages": []}'], [], "line 2: no message of the assistant to learn from"),
        (['{"messages": [{"role": "user"}]}'], [], 'line 1: "messages" must be a list of messages with "role" and'),
        ([GOOD.replace("user", "tool"), GOOD], [], "line 1: the chat template refuses it: unknown role"),
        ([GOOD], [], "too few lines"),
        ([GOOD.replace("dog?", "d" * 300)] * 2, [], "no answer begins within the first 128 tokens of a chat"),
        ([GOOD] * 2, ["--train=qlora"], "name one"),
        ([GOOD] * 2, ["--train=qlora", "--model=bare"], "pip install bitsandbytes accelerate"),
        ([GOOD] * 2, ["--model=bare"], "the tokenizer of bare has no chat template"),
        ([GOOD] * 2, ["--model=mamba"], "MambaForCausalLM does not" if IS_NEW else "`MambaForCausalLM` has no loss"),
        ([GOOD] * 2, ["--save=chats.jsonl"], "chats.jsonl: a file, not a folder"),
    ],
)
def test_what_is_refused(lines, arguments, message, monkeypatch, capsys):
    Path("chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    make_tokenizer(None).save_pretrained("bare")
    make_chat_tokenizer(None).save_pretrained("mamba")
    mamba = MambaConfig(vocab_size=259, hidden_size=8, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(mamba).save_pretrained("mamba")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, "--chats=chats.jsonl", *arguments])
    assert message in f"{stop.value}{capsys.readouterr().err}"
