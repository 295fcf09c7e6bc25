"""Answers to the names that other trainers and older documents use for our settings: our name and value.

No alias is accepted. A reader who knows Accelerate, DeepSpeed or Megatron learns our word
instead. The names are in ``alias_table``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from orchestrator.config.values import as_declared, choices
from orchestrator.errors import UserError

Form = Literal["flag", "yaml", "python"]
"""How an answer is written: --learning-rate 0.1, learning_rate: 0.1 or learning_rate=0.1."""

LEAVE_OUT = "leave it out"
ANY_VALUE = "…"


@dataclass(frozen=True)
class SettingNames:
    """The settings that an answer may name: the section and the type of each."""

    sections: Mapping[str, str]
    types: Mapping[str, Any]


@dataclass(frozen=True)
class Alias:
    """Our name for a foreign one."""

    name: str | None
    """Our setting; None if there is none, and then the note says what to do."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Foreign values, in lower case, to ours. Other values are kept, if our setting takes them."""
    other: str | None = None
    """Our value for all foreign values that are not listed; None keeps them."""
    note: str = ""
    by_value: Mapping[str, Alias] = field(default_factory=dict)
    """Aliases for values, in lower case, that belong to another setting of ours."""
    with_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the same section that must be set too."""

    def advice(self, value: str | None, form: Form, names: SettingNames) -> str:
        """Return the words to use instead."""
        key = (value or "").lower()
        if key in self.by_value:
            return self.by_value[key].advice(value, form, names)
        if self.name is None:
            return self.note
        our_value = self.values.get(key, self.other or value)
        if our_value == LEAVE_OUT:
            return f"{LEAVE_OUT}: that is the default of {self.name}"
        settings = [*self.with_settings.items(), (self.name, our_value)]
        if form == "flag":
            text = " ".join(_as_flag(name, value, names) for name, value in settings)
        elif form == "python":
            text = ", ".join(_as_python(name, value, names) for name, value in settings)
        else:
            lines = " and ".join(_as_yaml(name, value, names) for name, value in settings)
            text = f"{lines} under {names.sections[self.name]}:"
        return f"write {text}" + (f" ({self.note})" if self.note else "")


def _as_flag(name: str, value: str | None, names: SettingNames) -> str:
    flag = name.replace("_", "-")
    if names.types[name] is bool:
        return f"--no-{flag}" if value == "false" else f"--{flag}"
    return f"--{flag} {_accepted_value(name, value, names)}".removesuffix(" []")


def _as_yaml(name: str, value: str | None, names: SettingNames) -> str:
    hint = names.types[name]
    text = _accepted_value(name, value or "true" if hint is bool else value, names)
    if {str, Path} & {hint, *get_args(hint)}:
        # Text that YAML would read as a number or a truth value needs quotes.
        text = yaml.safe_dump(text, allow_unicode=True).splitlines()[0]
    return f"{name}: {text}"


def _as_python(name: str, value: str | None, names: SettingNames) -> str:
    hint = names.types[name]
    text = _accepted_value(name, value or "true" if hint is bool else value, names)
    if text == ANY_VALUE or "|" in text:
        return f"{name}={text}"
    declared = as_declared(name, hint, [] if text == "[]" else text)
    return f"{name}={str(declared) if isinstance(declared, Path) else declared!r}"


def _accepted_value(name: str, value: str | None, names: SettingNames) -> str:
    """Return the value if our setting takes it, else the words to choose from."""
    hint = names.types[name]
    try:
        if value is not None and value != "[]":
            as_declared(name, hint, value)
        return ANY_VALUE if value is None else value
    except UserError:
        return "true" if hint is bool else "|".join(choices(hint)) or ANY_VALUE
