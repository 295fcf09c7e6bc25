"""Converts a value to the declared type of its setting, or refuses it with found and needed."""

from __future__ import annotations

import reprlib
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from orchestrator.config.sections.checks import LARGEST_NUMBER
from orchestrator.errors import UserError

_SINGULAR = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "null",
}
_PLURAL = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}


def as_declared(name: str, hint: Any, value: Any) -> Any:
    """Return the value as its setting declares it: a list as a tuple, text as a path, and so on."""
    from pydantic import ValidationError  # takes 60 ms to import, and --help does not need it

    if isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
        # A number of thousands of digits takes long to print.
        shown = str(value) if value.bit_length() < 128 else f"a whole number of {value.bit_length()} bits"
        raise UserError(f"{name} is {shown}; {type_text(hint)} of at most 63 bits was needed")
    try:
        return _adapter(hint).validate_python(_normalised(hint, value))
    except (ValidationError, _UnexpectedTruthValue):
        raise UserError(f"{name} is {_shown(value)}; {type_text(hint)} was needed") from None


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


class _UnexpectedTruthValue(Exception):
    """A truth value for a setting of another type."""


def _normalised(hint: Any, value: Any) -> Any:
    """Return the value in the form that the type check accepts.

    One value, or text with commas, becomes a list for a setting of several values. ``on`` and
    ``off``, which YAML reads as truth values, become words again. A truth value for any other
    setting is refused: pydantic would take it for a number.
    """
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        elif value is not None and not isinstance(value, list | tuple):
            value = [value]
        return value and tuple(_normalised(element, entry) for entry in value)
    if isinstance(value, bool) and hint is not bool:
        word = "on" if value else "off"
        if word in choices(hint):
            return word
        raise _UnexpectedTruthValue
    return value


def choices(hint: Any) -> tuple[str, ...]:
    """Return the words that a setting, or an element of its list, may be; empty if any value is possible."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in choices(part))


def type_text(hint: Any) -> str:
    """Return a type in words, for messages."""
    if hint in _SINGULAR:
        return _SINGULAR[hint]
    if get_origin(hint) is Literal:
        return " or ".join(repr(word) for word in get_args(hint))
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        return f"a list of {_PLURAL.get(element) or type_text(element)}"
    return " or ".join(type_text(part) for part in get_args(hint)) or str(hint)


def _shown(value: Any) -> str:
    """Return a value as YAML has it, cut if it is long."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else reprlib.repr(value)
