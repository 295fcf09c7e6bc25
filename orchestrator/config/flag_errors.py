"""Explains in one line why the parser refused the flags of a verb.

The parser prints its own messages in boxes. They are kept back, and the flags are read again with
the checks of YAML files and of Python, so that one mistake has one answer wherever it is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import MISSING, dataclass, fields
from io import StringIO
from typing import Any, get_args, get_origin, get_type_hints

from orchestrator.config.settings import Config, flat_names, setting_types
from orchestrator.config.values import as_declared, type_text
from orchestrator.errors import UserError

_FRAME = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[│─╭╮╰╯]")


@dataclass(frozen=True)
class FlagGrammar:
    """The flags of a verb: its options, the type of each, and the settings below the flags."""

    prog: str
    options: type
    base: Config | None
    """The settings of ``--config``, or the defaults; None for a verb without settings."""

    @property
    def types(self) -> Mapping[str, Any]:
        own = {name: hint for name, hint in get_type_hints(self.options).items() if hint is not Config}
        return own if self.base is None else {**setting_types(), **own}

    @property
    def required(self) -> list[str]:
        return [
            field.name
            for field in fields(self.options)
            if field.default is MISSING and field.default_factory is MISSING and field.name != "settings"
        ]


@contextmanager
def one_line_errors(grammar: FlagGrammar, argv: Sequence[str]) -> Iterator[None]:
    """Turn the parser's exit into a UserError. ``argv`` is what the parser reads."""
    boxes = StringIO()
    try:
        with redirect_stderr(boxes):
            yield
    except SystemExit as exit_:
        if not exit_.code:
            raise
        _check_values(grammar, argv)
        # A mistake that only the parser knows.
        text = " ".join(_FRAME.sub(" ", boxes.getvalue()).split())
        raise UserError(text or f"the flags cannot be read; see {grammar.prog} --help") from None


def _check_values(grammar: FlagGrammar, argv: Sequence[str]) -> None:
    """Raise UserError for the first flag with a wrong value, else for values that contradict each other."""
    given: dict[str, Any] = {}
    for flag, values in _flags_with_values(argv):
        if flag:
            name = _option(flag, grammar)
            _check_count(flag, values, grammar.types[name])
            given[name] = _value(flag, values, grammar.types[name])
        elif values:
            raise UserError(f"unexpected {values[0]!r}; see {grammar.prog} --help")
    missing = [name for name in grammar.required if name not in given]
    if missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UserError(f"{names} is missing; see {grammar.prog} --help")
    if grammar.base is not None:
        settings = {name: value for name, value in given.items() if name in flat_names()}
        try:
            grammar.base.but(**settings)
        except UserError as error:
            raise _with_flag(error, settings) from None


def _with_flag(error: UserError, settings: Mapping[str, Any]) -> UserError:
    """Return an error about the value of a setting with the name of the flag that gave it."""
    name, verb, rest = str(error).partition(" is ")
    return UserError(f"--{name.replace('_', '-')}{verb}{rest}") if name in settings else error


def _flags_with_values(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the values that follow it; values before the first flag come with ''."""
    flag = ""
    values: list[str] = []
    for token in argv:
        if not token.startswith("--"):
            values.append(token)
            continue
        yield flag, values
        flag, equals, value = token.partition("=")
        values = [value] if equals else []
    yield flag, values


def _option(flag: str, grammar: FlagGrammar) -> str:
    """Return the option or setting of a flag."""
    name = flag[2:].replace("-", "_")
    if name in grammar.types:
        return name
    positive = name.removeprefix("no_")
    if grammar.types.get(positive) is not bool:
        raise UserError(f"unknown flag {flag}: {positive} is no switch; see {grammar.prog} --help")
    return positive


def _check_count(flag: str, values: list[str], hint: Any) -> None:
    """Raise UserError for a missing value, and for one too many."""
    num_allowed = 0 if hint is bool else 1
    if get_origin(hint) is tuple:
        return
    if len(values) > num_allowed:
        raise UserError(f"unexpected {values[num_allowed]!r} after {' '.join([flag, *values[:num_allowed]])}")
    if len(values) < num_allowed:
        raise UserError(f"{flag} needs a value: {type_text(hint)}")


def _value(flag: str, values: list[str], hint: Any) -> Any:
    if hint is bool:
        return not flag.startswith("--no-")
    if get_origin(hint) is tuple:
        return as_declared(flag, hint, values)
    if values == ["None"] and type(None) in get_args(hint):
        return None
    return as_declared(flag, hint, values[0])
