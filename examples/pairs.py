"""Pairs of answers as tokens, for finetune_preferences.py: read, joined with their prompt, and cut.

A line is of one of the forms that trl documents and data sets of the hub have. The prompt may stand beside the answers,
or be what they both begin with, and each is a text or a list of messages:

    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    {"prompt": [{"role": "user", "content": "Which color?"}], "chosen": [{"role": "assistant", ...}], "rejected": [...]}
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [{"role": "user", ...}, ...]}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chats import IGNORED, MESSAGES, Message, Text, are_messages, shared
from data_files import Skipped, read_lines
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    """Two answers, each with the prompt before it, and the place where they were found."""

    place: str
    chosen: str | list[Message]
    rejected: str | list[Message]


def read_pairs(path: str, skipped: Skipped) -> list[Pair]:
    """Return the pairs of a file of JSON lines."""
    pairs = [skipped.attempt(make_pair, place, line) for place, line in read_lines(path, skipped)]
    return [pair for pair in pairs if pair is not None]


def make_pair(place: str, line: dict[str, Any]) -> Pair:
    """Return the pair of a line.

    Raises:
        ValueError: If there is none, or nothing to learn from it.

    """
    for name in ("chosen", "rejected"):
        if name not in line:
            raise ValueError(f'{place}: a pair without "{name}"')
    prompt, chosen, rejected = line.get("prompt"), line["chosen"], line["rejected"]
    are_texts = isinstance(chosen, str) and isinstance(rejected, str)
    if not are_texts and not (are_messages(chosen) and are_messages(rejected)):
        raise ValueError(f'{place}: "chosen" and "rejected" must be two texts, or two lists of {MESSAGES}')
    if chosen == rejected:
        raise ValueError(f'{place}: "chosen" and "rejected" are the same')
    if isinstance(prompt, str) if are_texts else are_messages(prompt):
        return Pair(place, prompt + chosen, prompt + rejected)
    if isinstance(prompt, list) and not are_messages(prompt):
        raise ValueError(f'{place}: "prompt" must be a text, or a list of {MESSAGES}')
    if isinstance(prompt, list) or not shared(chosen, rejected):
        raise ValueError(f'{place}: no "prompt" of the kind of the answers, nor do both begin with one')
    return Pair(place, chosen, rejected)  # beside whole chats, some data sets have the prompt as a text, too


def encode_pair(tokenizer: PreTrainedTokenizerBase, pair: Pair, length: int) -> tuple[Text, Text]:
    """Return tokens and labels of both answers.

    What both begin with, the prompt above all, is as probable in one as in the other, and cancels out in the loss.

    Raises:
        ValueError: If the answers do not differ within this number of tokens.

    """
    chosen, rejected = (write(tokenizer, pair.place, text)[:length] for text in (pair.chosen, pair.rejected))
    start = max(1, shared(chosen, rejected))  # the first token has none before it
    if start >= min(len(chosen), len(rejected)):
        within = f"within the first {length} tokens of prompt and answer"
        raise ValueError(f"{pair.place}: the answers do not differ {within}")
    before = [IGNORED] * start
    return (chosen, before + chosen[start:]), (rejected, before + rejected[start:])


def write(tokenizer: PreTrainedTokenizerBase, place: str, text: str | list[Message]) -> list[int]:
    """Return the tokens of a text, with one at its end that says so, or of messages, by the tokenizer's template."""
    if isinstance(text, str):
        tokens = tokenizer(text)["input_ids"]
        return tokens if tokens[-1:] == [tokenizer.eos_token_id] else [*tokens, tokenizer.eos_token_id]
    try:
        return tokenizer.apply_chat_template(text, return_dict=True)["input_ids"]
    except (TemplateError, ValueError, IndexError) as error:  # the last two where there is no message
        raise ValueError(f"{place}: the chat template refuses it: {error}") from None
