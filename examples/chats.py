"""Chats as rows of tokens, for finetune_chat.py: read, written by a template, and packed. pairs.py reads like it.

A file has one chat a line, or is one list of chats, as many data sets come. Its keys tell in which form a chat is, and
a chat of no form is skipped and counted:

    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}   (ShareGPT)
    {"instruction": "Translate.", "input": "Warum?", "output": "Why?"}                              (Alpaca)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from data_files import Skipped, read_lines
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

IGNORED = -100
MESSAGES = 'messages with "role" and "content", which are texts'
FORMS = '"messages", "conversations" (ShareGPT), or "instruction" and "output" (Alpaca)'
SPEAKERS = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
Found = TypeVar("Found")
Message = dict[str, str]
Text = tuple[list[int], list[int]]  # tokens, and the same as labels, with IGNORED for what is not learned


def read_chats(path: str, skipped: Skipped) -> Iterator[tuple[str, list[Message]]]:
    """Yield the chats of a file, each with its place."""
    for place, found in read_lines(path, skipped):
        messages = skipped.attempt(chat_to_learn, place, found)
        if messages is not None:
            yield place, messages


def chat_to_learn(place: str, found: dict[str, Any]) -> list[Message]:
    """Return the messages of a chat in which the assistant says something.

    Raises:
        ValueError: If it does not, or if this is no chat.

    """
    messages = chat_of(place, found)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{place}: no message of the assistant to learn from")
    return messages


def chat_of(place: str, found: dict[str, Any]) -> list[Message]:
    """Return the messages of a chat in one of three forms, which its keys tell apart.

    Raises:
        ValueError: If it is of none of them.

    """
    if "instruction" in found and "output" in found:
        return chat_of_alpaca(place, found)
    key = next((key for key in ("messages", "conversations") if key in found), None)
    if key is None:
        keys = ", ".join(f'"{key}"' for key in found)
        raise ValueError(f"{place}: a chat has {FORMS}, but here is {keys or 'nothing'}")
    messages = found[key]
    if isinstance(messages, list):
        messages = [message_of_sharegpt(message) for message in messages]
    if not are_messages(messages):
        raise ValueError(f'{place}: "{key}" must be a list of {MESSAGES}')
    return messages


def message_of_sharegpt(message: Any) -> Any:
    """Return a message with the names that templates know, if it has those of ShareGPT."""
    if not isinstance(message, dict) or not isinstance(message.get("from"), str):
        return message
    return {"role": SPEAKERS.get(message["from"], message["from"]), "content": message.get("value")}


def chat_of_alpaca(place: str, found: dict[str, Any]) -> list[Message]:
    """Return an instruction, what it is about if there is anything, and the output as a question and its answer."""
    texts = [found.get("system") or "", found["instruction"], found.get("input") or "", found["output"]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f'{place}: "instruction", "input" and "output" must be texts')
    system, instruction, about, output = texts
    question = "\n\n".join(filter(None, [instruction, about]))
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": question}, {"role": "assistant", "content": output}]


def are_messages(found: object) -> bool:
    """Tell whether this is what MESSAGES says."""
    return isinstance(found, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in found
    )


def split(found: list[Found], path: str | None, skipped: Skipped) -> tuple[list[Found], list[Found]]:
    """Return what is for training, and the last tenth, which is for validation.

    Raises:
        ValueError: If nothing would be left to learn from.

    """
    held_out = max(1, len(found) // 10)
    if len(found) <= held_out:
        raise ValueError(f"{path}: too few lines, as a tenth, or at least one, is for validation{skipped}")
    return found[:-held_out], found[-held_out:]


def prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Return the tokens that ask for the next answer."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Iterator[Text]:
    """Yield tokens and labels of a chat: each answer is learned after just the tokens that will ask for it.

    A chat is one text, unless the template writes its earlier turns otherwise than its last, as those do that leave out
    old thoughts: then a new text begins, in which only later answers are learned.

    Raises:
        ValueError: If the template has no place for a message.

    """
    try:
        written = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens: list[int] = []
        labels: list[int] = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = prompt(tokenizer, messages[:turn])
                answered = tokenizer.apply_chat_template(messages[: turn + 1], return_dict=True)["input_ids"]
                if shared(tokens, asked) < len(tokens):
                    yield tokens, labels
                    labels = []
                start = max(1, shared(asked, answered))  # the first token comes after that of another chat
                tokens, labels = answered, labels[:start] + [IGNORED] * (start - len(labels)) + answered[start:]
            elif message["content"].strip() not in written:
                raise ValueError(f"the chat template leaves out messages of the role {message['role']!r}")
        yield tokens, labels
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from None


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return with how many equal tokens two texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def pack(texts: list[Text], length: int) -> list[list[Text]]:
    """Divide texts into rows of at most `length` tokens: the longest first, each where it leaves the least room."""
    rows: list[list[Text]] = []
    room: list[tuple[int, int]] = []  # what is left of each row, in order of size
    for text in sorted(texts, key=lambda text: -len(text[0])):
        place = bisect_left(room, (len(text[0]), 0))
        if place == len(room):
            rows.append([])
            room.append((length, len(rows) - 1))
        left, row = room.pop(place)
        rows[row].append(text)
        insort(room, (left - len(text[0]), row))
    return rows


def batch(rows: list[list[Text]], length: int, padding: int) -> dict[str, Tensor]:
    """Return the tokens, labels and positions of rows.

    Positions begin again with each text. By that transformers knows, if it gets no attention mask, that it is another
    one, and lets no token attend to those of the texts before.
    """
    positions = torch.arange(length).repeat(len(rows), 1)
    tokens, labels = torch.full_like(positions, padding), torch.full_like(positions, IGNORED)
    for index, row in enumerate(rows):
        end = 0
        for text in row:
            start, end = end, end + len(text[0])
            tokens[index, start:end], labels[index, start:end] = torch.tensor(text)
            positions[index, end:] = torch.arange(length - end)
    return {"tokens": tokens, "labels": labels, "positions": positions}
