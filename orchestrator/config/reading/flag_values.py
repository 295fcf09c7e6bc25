"""Converts the tokens of a command line to the values of a verb's options and settings.

One mistake has one answer wherever it is made: values are checked as those of YAML files and of
Python are, and the answer names the flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args, get_origin, get_type_hints

from orchestrator.config.sections.checks import Switch
from orchestrator.config.settings import Config, flat_names, setting_types
from orchestrator.config.values import as_declared, type_text
from orchestrator.errors import UserError


@dataclass(frozen=True)
class FlagGrammar:
    """The flags of a verb: its own options, and those of the settings if it takes any."""

    prog: str
    options: type

    @property
    def own_types(self) -> Mapping[str, Any]:
        """The declared type of each option of the verb, ``settings`` left out."""
        return {name: hint for name, hint in get_type_hints(self.options).items() if hint is not Config}

    @property
    def takes_settings(self) -> bool:
        return Config in get_type_hints(self.options).values()

    @property
    def types(self) -> Mapping[str, Any]:
        """The declared type of every option and setting."""
        return {**setting_types(), **self.own_types} if self.takes_settings else self.own_types

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the value of each option and setting that is given; the last one, if there are several.

        Raise UserError for the first wrong value, and for required options that are missing."""
        types = self.types
        given: dict[str, Any] = {}
        for flag, values in _flags_with_values(argv):
            if flag:
                name = self._named_by(flag, types)
                given[name] = _value(flag, name, values, types[name])
            elif values:
                raise UserError(f"unexpected {values[0]!r}; see {self.prog} --help")
        missing = [name for name in self._required() if name not in given]
        if missing:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise UserError(f"{names} is missing; see {self.prog} --help")
        return given

    def _required(self) -> list[str]:
        return [
            field.name
            for field in fields(self.options)
            if field.default is MISSING and field.default_factory is MISSING and field.name != "settings"
        ]

    def _named_by(self, flag: str, types: Mapping[str, Any]) -> str:
        """Return the option or setting of a flag; a switch has a second flag, --no-NAME."""
        name = flag[2:].replace("-", "_")
        if name in types:
            return name
        positive = name.removeprefix("no_")
        if types.get(positive) not in (bool, Switch):
            raise UserError(f"unknown flag {flag}: {positive} is no switch; see {self.prog} --help")
        return positive


def changed_config(base: Config, settings: Mapping[str, Any]) -> Config:
    """Return the settings with those of flags in their place; an error names the flag of its cause."""
    try:
        return base.but(**settings)
    except UserError as error:
        # The checks of a section begin their message with the name of the setting.
        name, verb, rest = str(error).partition(" is ")
        if name not in settings:
            raise
        raise UserError(f"--{name.replace('_', '-')}{verb}{rest}") from None


def _flags_with_values(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the values that follow it; values before the first flag come with ''."""
    flag = ""
    values: list[str] = []
    for token in argv:
        if not token.startswith("--") or token == "--":
            values.append(token)
            continue
        yield flag, values
        flag, equals, value = token.partition("=")
        values = [value] if equals else []
    yield flag, values


def _value(flag: str, name: str, values: Sequence[str], hint: Any) -> Any:
    """Return the value that a flag gives; UserError for a wrong one, a missing one, and for one too many."""
    if get_origin(hint) is tuple:
        if name in flat_names():
            # --devices 0,2 is --devices 0 2; a path among a verb's own options may have a comma in it.
            values = [part for value in values for part in value.split(",")]
        return as_declared(flag, hint, list(values))
    negated = name != flag[2:].replace("-", "_")
    # A switch that the plan may decide is on without a value: --compile is --compile on.
    needs_no_value = hint is bool or (hint == Switch and (negated or not values))
    num_allowed = 0 if needs_no_value else 1
    if len(values) > num_allowed:
        raise UserError(f"unexpected {values[num_allowed]!r} after {' '.join([flag, *values[:num_allowed]])}")
    if needs_no_value:
        return not negated if hint is bool else "off" if negated else "on"
    if not values:
        raise UserError(f"{flag} needs a value: {type_text(hint)}")
    if values[0] == "None" and type(None) in get_args(hint):
        return None
    return as_declared(flag, hint, values[0])
