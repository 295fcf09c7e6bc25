"""One name of another trainer, answered with our name and the value to give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import yaml

from orchestrator.config.settings import flat_names, setting_types
from orchestrator.config.values import as_declared, choices
from orchestrator.errors import UserError

LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class Spelling:
    """Our name for an old one. ``values`` translates values; a value that is neither known there nor good for our setting is
    answered with the words the setting knows. ``elsewhere`` holds values that are the matter of another setting here, ``beside``
    settings of the same section that go with it."""

    name: str | None
    values: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    elsewhere: Mapping[str, Spelling] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)

    def advice(self, value: str | None, flag: bool) -> str:
        """The words to use instead, as a flag or as a line of YAML."""
        other = self.elsewhere.get((value or "").lower())
        if other is not None:
            return other.advice(value, flag)
        if self.name is None:
            return self.note
        ours = self.values.get((value or "").lower(), value)
        if ours == LEAVE_OUT:
            return f"{LEAVE_OUT}: that is the default of {self.name}"
        settings = [*self.beside.items(), (self.name, ours)]
        if flag:
            text = " ".join(_as_flag(name, given) for name, given in settings)
        else:
            text = f"{' and '.join(_as_yaml(name, given) for name, given in settings)} under {flat_names()[self.name]}:"
        return f"write {text}" + (f" ({self.note})" if self.note else "")


def _as_flag(name: str, value: str | None) -> str:
    flag = name.replace("_", "-")
    if setting_types()[name] is bool:
        return f"--no-{flag}" if value == "false" else f"--{flag}"
    return f"--{flag} {_good(name, value)}".removesuffix(" []")


def _as_yaml(name: str, value: str | None) -> str:
    hint = setting_types()[name]
    shown = _good(name, value or "true" if hint is bool else value)
    if {str, Path} & {
        hint,
        *get_args(hint),
    }:  # what YAML would take for a number or a truth value wants quotes
        shown = yaml.safe_dump(shown, allow_unicode=True).splitlines()[0]
    return f"{name}: {shown}"


def _good(name: str, value: str | None) -> str:
    """A value that our setting takes: the given one, or the words to choose from."""
    hint = setting_types()[name]
    try:
        if value is not None and value != "[]":
            as_declared(name, hint, value)
        return "…" if value is None else value
    except UserError:
        return "true" if hint is bool else "|".join(choices(hint)) or "…"
