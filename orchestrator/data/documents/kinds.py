"""Kinds of rows, found by their columns: texts, chats, prompts with completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.data.documents.rows import Row
from orchestrator.errors import UserError

Message = dict[str, Any]

TEXT = "text"
CHAT = "chat"
COMPLETION = "prompt and completion"

_SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


_PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("prompt", "response"),
)
"""Columns of other data sets that hold a prompt and its completion."""


class BadRowError(Exception):
    """A row that cannot be used; the message says why, without the row's place."""


@dataclass(frozen=True)
class TextRow:
    place: str
    text: str


@dataclass(frozen=True)
class Chat:
    place: str
    messages: list[Message]
    tools: list[Any] | None = None
    first_trained: int = 0
    """The messages before this one belong to a prompt and are not trained."""


@dataclass(frozen=True)
class Completion:
    place: str
    prompt: str
    completion: str


ParsedRow = TextRow | Chat | Completion


class RowParser:
    """Makes a text, a chat or a completion of each row. All rows are of the kind of the first one."""

    def __init__(self, text_column: str) -> None:
        self._text_column = text_column
        self._first: tuple[str, str] | None = None

    def parse(self, row: Row) -> ParsedRow:
        """Raises ``BadRowError`` for a row that cannot be used, ``UserError`` for one of another kind."""
        if not isinstance(row.value, Mapping):
            raise BadRowError(f"is {_shown(row.value)}; an object with columns was needed")
        columns = {name: value for name, value in row.value.items() if value is not None}
        kind = self._kind_of(columns)
        if kind is None:
            raise BadRowError(
                f"has the columns {', '.join(map(str, row.value)) or '(none)'}; needed: "
                f"{self._text_column}, messages, conversations, or prompt and completion (--text-column)"
                f"{_rename_hint(columns)}"
            )
        self.check_kind(kind, row.place)
        if kind == TEXT:
            return TextRow(row.place, _string(columns, self._text_column))
        if kind == CHAT:
            name = "messages" if "messages" in columns else "conversations"
            return Chat(row.place, _messages(columns[name], name), _tools(columns.get("tools")))
        return _completion(row.place, columns)

    @property
    def kind(self) -> str | None:
        """The kind of the first row; None before it."""
        return self._first[0] if self._first else None

    def check_kind(self, kind: str, place: str) -> None:
        """Raise ``UserError`` if an earlier row was of another kind."""
        self._first = self._first or (kind, place)
        first_kind, first_place = self._first
        if kind != first_kind:
            raise UserError(
                f"{place} is a {kind}, but {first_place} is a {first_kind}; "
                "rows of one kind were needed: train on them in separate runs, or convert one of them"
            )

    def _kind_of(self, columns: Mapping[str, Any]) -> str | None:
        # Data sets of chats often have the first prompt as a column of its own.
        if self._text_column != "text" and self._text_column in columns:
            return TEXT
        if "messages" in columns or "conversations" in columns:
            return CHAT
        if "prompt" in columns and "completion" in columns:
            return COMPLETION
        return TEXT if self._text_column in columns else None


def _rename_hint(columns: Mapping[str, Any]) -> str:
    """Return how to rename the columns of a prompt and its completion; empty if they are unknown."""
    pair = next((pair for pair in _PAIRS if all(name in columns for name in pair)), None)
    if pair is None:
        return ""
    asked, answered = pair
    joined = f"{asked} and input together" if "input" in columns else asked
    renamed = f"{joined} as prompt, and " if asked != "prompt" else ""
    return f"; write {renamed}{answered} as completion"


def is_empty(message: Message) -> bool:
    """Return whether a message says nothing: no text, no reasoning, and no call of a tool."""
    if message.get("tool_calls") or message.get("reasoning_content") or message.get("thinking"):
        return False
    content = message["content"]
    if isinstance(content, str):
        return not content.strip()
    return not any(part for part in content)


def _completion(place: str, columns: Mapping[str, Any]) -> Chat | Completion:
    prompt = columns["prompt"]
    completion = columns["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(place, prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRowError(
            f"has a prompt that is {_shown(prompt)} and a completion that is {_shown(completion)}; "
            "two texts or two lists of messages were needed"
        )
    first = _messages(prompt, "prompt")
    messages = [*first, *_messages(completion, "completion")]
    return Chat(place, messages, _tools(columns.get("tools")), first_trained=len(first))


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadRowError(f"has {name} that are {_shown(value)}; a list of messages was needed")
    return [_message(part, f"{name}[{number}]") for number, part in enumerate(value)]


def _message(value: Any, name: str) -> Message:
    """Return a message with a role and a content; ShareGPT's ``from`` and ``value`` are renamed."""
    if not isinstance(value, Mapping):
        raise BadRowError(f"has {name}, which is {_shown(value)}; an object with role and content was needed")
    # Tables have every key in every message, with null where there is none; templates test for the key.
    message = {key: part for key, part in value.items() if part is not None}
    if "from" in message and "role" not in message:
        message = _renamed(message, name)
    if not isinstance(message.get("role"), str):
        raise BadRowError(f"has {name} with the role {_shown(message.get('role'))}; a name was needed")
    content = message.setdefault("content", "")
    if not isinstance(content, str | list):
        raise BadRowError(f"has {name} with the content {_shown(content)}; a text was needed")
    return message


def _renamed(message: Message, name: str) -> Message:
    role = message.pop("from")
    if role not in _SHAREGPT_ROLES:
        raise BadRowError(
            f"has {name} from {_shown(role)}; known: {', '.join(_SHAREGPT_ROLES)}. "
            "Write other turns as messages with role, content and tool_calls"
        )
    return {**message, "role": _SHAREGPT_ROLES[role], "content": message.pop("value", None)}


def _tools(value: Any) -> list[Any] | None:
    """Return the descriptions of tools; many data sets hold them as JSON in a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise BadRowError(f"has tools that are not JSON: {_shown(value)}") from None
    if value is not None and not isinstance(value, list):
        raise BadRowError(f"has tools that are {_shown(value)}; a list was needed")
    return value or None


def _string(columns: Mapping[str, Any], name: str) -> str:
    value = columns[name]
    if not isinstance(value, str):
        raise BadRowError(f"has {name} that is {_shown(value)}; a text was needed")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
