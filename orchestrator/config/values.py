"""One value against the type its setting is declared with: mended where YAML or Python say the same thing in another way,
refused in words where they do not."""

from __future__ import annotations

import reprlib
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from orchestrator.config.checks import LARGEST
from orchestrator.errors import UserError

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}
_MANY = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}


def as_declared(name: str, hint: Any, value: Any) -> Any:
    """The value as its setting wants it: a list as a tuple, text as a path, and so on."""
    from pydantic import ValidationError  # costs 60 ms, not needed by flags

    if (
        isinstance(value, int) and abs(value) >= LARGEST
    ):  # one of thousands of digits takes long to be written down
        shown = str(value) if value.bit_length() < 128 else f"a whole number of {value.bit_length()} bits"
        raise UserError(f"{name} is {shown}; {needed(hint)} of at most 63 bits was needed")
    try:
        return _adapter(hint).validate_python(_mended(hint, value))
    except (ValidationError, _TruthValue):
        raise UserError(f"{name} is {_shown(value)}; {needed(hint)} was needed") from None


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


class _TruthValue(Exception):
    """A truth value where something else was needed."""


def _mended(hint: Any, value: Any) -> Any:
    """``on`` and ``off``, which YAML reads as truth values, are words here; one value may stand for a list of one, and text
    with commas for a list; and a truth value is no number."""
    if get_origin(hint) is tuple:
        single = value.split(",") if isinstance(value, str) else [value]
        values = (
            value
            if isinstance(value, list | tuple) or value is None
            else [v.strip() if isinstance(v, str) else v for v in single]
        )
        return values and tuple(_mended(get_args(hint)[0], inner) for inner in values)
    if isinstance(value, bool) and hint is not bool:
        if {"on", "off"} <= set(choices(hint)):
            return "on" if value else "off"
        raise _TruthValue
    return value


def choices(hint: Any) -> tuple[str, ...]:
    """The words a setting may be, the elements of a list included; none where it is free."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in choices(part))


def needed(hint: Any) -> str:
    """A type in words, for messages."""
    if hint in _WORDS:
        return _WORDS[hint]
    if get_origin(hint) is Literal:
        return " or ".join(repr(word) for word in get_args(hint))
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        return f"a list of {_MANY.get(kind) or needed(kind)}"
    return " or ".join(needed(part) for part in get_args(hint)) or str(hint)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return reprlib.repr(value)
