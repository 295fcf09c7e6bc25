"""The text of a chat by the tokenizer's template, and the answers of the assistant in it.

Few templates mark the answers (``{% generation %}``), and some of those leave the stop token out. So answers
are found by rendering beginnings of the chat, for every template alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.data.documents.kinds import BadRowError, Chat, Message, is_empty
from orchestrator.errors import UserError

_MARK = "\ue000answer\ue001"
"""Stands for an answer; characters for private use are in no template."""


@dataclass(frozen=True)
class RenderedChat:
    place: str
    text: str
    answers: list[tuple[int, int]]
    """Characters of each answer with its stop token: begin and end."""
    empty_answers: int
    without_stop: int


class ChatRenderer:
    def __init__(self, tokenizer: Any) -> None:
        """Raises ``UserError`` if the tokenizer has no chat template."""
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the data has messages, but the tokenizer has no chat template; "
                "use the tokenizer of the instruction-tuned model, give a template as --chat-template FILE, "
                "or give the data as prompt and completion"
            )
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = tuple(token for token in special if token)
        any_special = "|".join(map(re.escape, self._special))
        self._special_next = re.compile(rf"\s*(?:{any_special})")
        self._end_of_header = re.compile(rf"\n|{any_special}")
        self._only_special = re.compile(rf"(?:\s|{any_special})*")

    def render(self, chat: Chat) -> RenderedChat:
        """Return the text of a chat, and where the answers are.

        Raises ``BadRowError`` for a chat that the template refuses, or in which an answer is not found."""
        text = self._render(chat, chat.messages)
        answers: list[tuple[int, int]] = []
        empty_answers = 0
        without_stop = 0
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant" or number < chat.first_trained:
                continue
            if is_empty(message):
                empty_answers += 1
                continue
            begin, end = self._find_answer(chat, number, text)
            if self._only_special.fullmatch(text, begin, end):
                empty_answers += 1  # the template leaves out what the message says
                continue
            stop = self._end_of_stop(text, begin, end)
            if stop is None and end == len(text):
                # Without a stop token the model would never learn to end an answer.
                text += self._tokenizer.eos_token
                stop = len(text)
            without_stop += stop is None
            answers.append((begin, end if stop is None else stop))
        return RenderedChat(chat.place, text, answers, empty_answers, without_stop)

    def render_whole(self, chat: Chat) -> RenderedChat:
        """Return the text of a chat as one answer."""
        text = self._render(chat, chat.messages)
        is_answered = chat.messages[-1]["role"] == "assistant"
        if is_answered and self._end_of_stop(text, 0, len(text)) is None:
            text += self._tokenizer.eos_token
        return RenderedChat(chat.place, text, [(0, len(text))], 0, 0)

    def _find_answer(self, chat: Chat, number: int, text: str) -> tuple[int, int]:
        """Return where an answer begins, after the prompt for it, and where its turn ends."""
        begin = self._find_begin(chat, number, text)
        end = None if begin is None else self._find_end(chat, number, text, begin)
        if begin is None or end is None or end < begin:
            raise BadRowError(
                f"has an answer, messages[{number}], that cannot be found in the text of the chat template, "
                "which renders it in another way within the chat than at its end; end the chat with this "
                "answer, or give --train-on all"
            )
        return begin, end

    def _find_begin(self, chat: Chat, number: int, text: str) -> int | None:
        prompt = self._beginning(chat, number, add_generation_prompt=True)
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        # The prompt opens the reasoning in another form than the answer: they share only the turn's header.
        turns = self._beginning(chat, number)
        if prompt is not None and turns is not None and text.startswith(turns):
            ends = (match.end() for match in self._end_of_header.finditer(prompt, len(turns)))
            shared = [end for end in ends if text.startswith(prompt[:end])]
            if shared:
                return shared[-1]
        before, _ = self._around_answer(chat, number)
        return len(before) if text.startswith(before) else None

    def _find_end(self, chat: Chat, number: int, text: str, begin: int) -> int | None:
        if number == len(chat.messages) - 1:
            return len(text)
        turns = self._beginning(chat, number + 1)
        if turns is not None and text.startswith(turns):
            return len(turns)
        # The template renders the answer in another way within the chat than at its end: it leaves out
        # earlier reasoning, or ends the last turn with another token.
        if chat.messages[number].get("tool_calls"):
            length = _length_of_calls(chat.messages[number], turns or "", text[begin:])
            return None if length is None else begin + length
        _, after = self._around_answer(chat, number)
        return len(text) - len(after) if text.endswith(after) else None

    def _around_answer(self, chat: Chat, number: int) -> tuple[str, str]:
        """Return the text before and after the content of a message; if unknown, marks that no text has."""
        message = chat.messages[number]
        marked: list[Message] = list(chat.messages)
        marked[number] = {**message, "content": _MARK}
        before, mark, after = self._render(chat, marked).rpartition(_MARK)
        # Calls stand beside the content, and some templates leave the content out.
        is_found = mark and not message.get("tool_calls")
        return (before, after) if is_found else (_MARK, _MARK)

    def _beginning(self, chat: Chat, count: int, add_generation_prompt: bool = False) -> str | None:
        """Return the text of the first messages; None if there are none or the template refuses so few."""
        if count == 0:
            return None
        try:
            return self._render(chat, chat.messages[:count], add_generation_prompt)
        except BadRowError:
            return None

    def _render(self, chat: Chat, messages: list[Message], add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadRowError(f"is refused by the chat template: {error}") from None

    def _end_of_stop(self, text: str, begin: int, end: int) -> int | None:
        """Return the end of the special token after an answer; None if there is none.

        White space after it, which many templates have, is not part of the turn."""
        answer = text[begin:end].rstrip()
        if answer.endswith(self._special):
            return begin + len(answer)
        following = self._special_next.match(text, end)
        return following.end() if following else None


def _length_of_calls(message: Message, turns: str, text: str) -> int | None:
    """Return the length of the calls of tools at the beginning of a text; None if they are not there.

    ``turns`` ends with the same calls, with reasoning before them that the text does not have."""
    call = message["tool_calls"][-1]
    name = call.get("function", call).get("name") if isinstance(call, Mapping) else None
    # The name tells calls from white space and tokens that stand anywhere.
    last = turns.rfind(name) if isinstance(name, str) and name else -1
    for start in range(max(len(turns) - len(text), 0), last + 1):
        if text.startswith(turns[start:]):
            return len(turns) - start
    return None
