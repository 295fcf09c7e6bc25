"""Answers to the names that other trainers and older documents use for our settings: our name and value.

No alias is accepted. A reader who knows Accelerate, DeepSpeed or Megatron learns our word
instead. The names are in ``foreign_names.yaml``, which describes its own form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from orchestrator.config.values import as_declared, choices
from orchestrator.errors import UserError
from orchestrator.types import flag_of

Form = Literal["flag", "yaml", "python"]
"""The form of an answer: --learning-rate 0.1, learning_rate: 0.1 or learning_rate=0.1."""

LEAVE_OUT = "leave it out"
ANY_VALUE = "…"

_EVERY_WAY_TO_SAY = {
    "any yes": ("", "true", "yes", "on", "1"),
    "any no": ("false", "no", "off", "0", "none"),
}


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
    """Words that follow the answer, or that are the answer if there is no setting."""
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
    if names.types[name] is bool:
        return flag_of(f"no_{name}" if value == "false" else name)
    return f"{flag_of(name)} {_accepted_value(name, value, names)}".removesuffix(" []")


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


# --- the names


@cache
def aliases() -> Mapping[str, Alias]:
    """Return the alias of every foreign name, in lower case with underscores."""
    text = files("orchestrator.config.names").joinpath("foreign_names.yaml").read_text(encoding="utf-8")
    # The base loader keeps every value as the text that it is: "on", "16" and "1e-4" are words here.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)(text)
    found: dict[str, Alias] = {}
    for entry in loader.get_single_data()["names"]:
        alias = read_alias({key: value for key, value in entry.items() if key != "names"})
        for name in entry["names"].split():
            if name in found:
                raise ValueError(f"foreign_names.yaml has {name} twice")
            found[name] = alias
    return found


def read_alias(entry: Mapping[str, Any]) -> Alias:
    """Return the alias of an entry of the file. Raise ValueError for fields that no entry has."""
    unknown = entry.keys() - {"setting", "values", "other", "note", "by_value", "with"}
    if unknown:
        raise ValueError(f"foreign_names.yaml has an entry with the unknown fields {sorted(unknown)}")
    by_value: dict[str, Alias] = {}
    for other in entry.get("by_value", ()):
        alias = read_alias(other)
        by_value |= dict.fromkeys(alias.values, alias)
    return Alias(
        name=entry.get("setting"),
        values=dict(_values(entry.get("values", {}))),
        other=entry.get("other"),
        note=entry.get("note", ""),
        by_value=by_value,
        with_settings=entry.get("with", {}),
    )


def _values(listed: Any) -> Iterator[tuple[str, str]]:
    """Yield foreign values with ours, from a mapping, or a list of mappings and words; words are kept."""
    if isinstance(listed, str):
        yield listed, listed
    elif isinstance(listed, list):
        for part in listed:
            yield from _values(part)
    else:
        for foreign, ours in listed.items():
            first, dots, last = foreign.partition("..")
            if dots:
                yield from ((str(number), ours) for number in range(int(first), int(last) + 1))
            else:
                yield from ((word, ours) for word in _EVERY_WAY_TO_SAY.get(foreign, (foreign,)))
