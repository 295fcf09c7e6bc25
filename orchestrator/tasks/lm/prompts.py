"""Prompts of a language model: texts of the user, or the beginnings of documents in its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.errors import UserError
from orchestrator.tasks.generation import Prompt
from orchestrator.types import first_line

_NUM_PROMPTS = 3
_TEXT_TOKENS = 32
"""Most tokens of a text that are given; the model continues them."""
_SHOWN_CHARACTERS = 60
_NO_LABEL = -100


def prompt_of(text: str, tokenizer: Any, is_chat: bool) -> Prompt:
    """Return a text as a prompt: in a chat as the message of a user, else as it is.

    Raises ``UserError`` for a text that the tokenizer or its chat template refuses."""
    from jinja2 import TemplateError

    try:
        return _tokenised(text, tokenizer, is_chat)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        # repr: half a character, as of a wrong encoding, could not be shown.
        raise UserError(
            f"--prompts {text[:_SHOWN_CHARACTERS]!r}: the tokenizer refuses the text ({first_line(error)}); "
            "change it, or leave it out"
        ) from None


def _tokenised(text: str, tokenizer: Any, is_chat: bool) -> Prompt:
    if not is_chat or not tokenizer.chat_template:
        tokens = tokenizer(text)["input_ids"]
        # Some tokenizers end each text; the model is to continue this one.
        return Prompt(tokens[:-1] if tokens and tokens[-1] == tokenizer.eos_token_id else tokens)
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def first_prompts(data: Any, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of the first documents in the data.

    A chat or completion is given up to its first trained token, a text up to its middle."""
    found: list[Prompt] = []
    for tokens_S, labels_S in _documents(data):
        if data.is_text:
            given = min(_TEXT_TOKENS, len(tokens_S) // 2)
            answer = tokens_S[given:]
        else:
            given = int((labels_S != _NO_LABEL).nonzero()[0]) + 1
            answer = _first_answer(labels_S[given - 1 :])
        if given:
            found.append(
                Prompt(tokens_S[:given].tolist(), tokenizer.decode(answer, skip_special_tokens=True))
            )
        if len(found) == _NUM_PROMPTS:
            break
    return found


def cut_prompt(prompt: Prompt, most: int) -> Prompt:
    """Return a prompt with its last tokens, as many as fit."""
    return Prompt(list(prompt.tokens)[-most:], prompt.reference)


def _documents(data: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and labels of the documents that have a label."""
    for index in range(len(data)):
        sample = data.gather(torch.tensor([index]))
        length = int(sample["mask"].sum())
        begins = (sample["position_ids"][0, :length] == 0).nonzero().flatten().tolist()
        for begin, end in zip(begins, [*begins[1:], length], strict=True):
            labels_S = sample["labels"][0, begin:end]
            if bool((labels_S != _NO_LABEL).any()):
                yield sample["input_ids"][0, begin:end], labels_S


def _first_answer(labels_S: Tensor) -> Sequence[int]:
    """Return the labels up to the first position without one."""
    without = (labels_S == _NO_LABEL).nonzero().flatten()
    end = int(without[0]) if len(without) else len(labels_S)
    return labels_S[:end].tolist()
