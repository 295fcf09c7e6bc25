"""Reads a YAML file into a frozen Config, with the origin of every value.

Names are checked before values. A wrong name is answered with the nearest known name, the
section it belongs to, or our name for a setting of another trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.names.nearest import nearest
from orchestrator.config.reading.safe_yaml import MAX_CHARACTERS, compose
from orchestrator.config.settings import (
    Config,
    as_flag_text,
    flat_names,
    foreign_name_advice,
    section_types,
    setting_types,
)
from orchestrator.config.values import as_declared
from orchestrator.errors import UserError

Origins = Mapping[str, str]

_MERGE_TAG = "tag:yaml.org,2002:merge"
_TEXT_TAG = "tag:yaml.org,2002:str"


@dataclass(frozen=True)
class Resolved:
    """A config and the origin of each of its values: ``default``, ``file NAME:LINE`` or ``flag --NAME``."""

    config: Config
    origins: Origins

    def origin(self, name: str) -> str:
        return self.origins.get(name, "default")


def read_file(path: Path) -> Resolved:
    """Read the config of a YAML file. Missing settings have their defaults."""
    try:
        with path.open(encoding="utf-8") as file:
            # One character more than allowed: ``compose`` then refuses the text, however long the
            # file is.
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise UserError(
            f"cannot read the config {path}: {error.strerror or error}; "
            "give the path of a YAML file to --config"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"the config {path} is not UTF-8 text; give a YAML file to --config") from None
    content, lines = _parse(text, path.name)
    _check_keys(content, lines)
    settings = {name: line for name, line in lines.items() if name not in section_types()}
    origins = {name.rpartition(".")[2]: f"file {line}" for name, line in settings.items()}
    return Resolved(_build(content, lines, path.name), origins)


# --- YAML


class _Loader(yaml.SafeLoader):
    """The safe loader with two changes.

    A key is text even if it looks like a truth value or a number. A value that cannot be built
    (a 13th month) is an error with its line.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE_TAG:
                key.tag = _TEXT_TAG
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


def _parse(text: str, file: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the content of a YAML text, and the place of each key: {'optim.learning_rate': 'cfg.yaml:3'}."""
    try:
        loader = _Loader(text)
        node = compose(loader)
        lines = _key_lines(node, file) if isinstance(node, yaml.MappingNode) else {}
        content = loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{file}{line} is not YAML: {problem}") from None
    except RecursionError:
        raise UserError(
            f"{file} is nested too deeply; two levels were needed, see 'orchestrator init'"
        ) from None
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise UserError(
            f"{file} holds a {type(content).__name__}; a mapping of sections was needed, "
            "see 'orchestrator init'"
        )
    return content, lines


def _key_lines(node: yaml.MappingNode, file: str, prefix: str = "") -> dict[str, str]:
    """Return the places of the keys of the first two levels. A key given twice is refused.

    A key that a merge (``<<: *other``) brings in may be given again; YAML lets the given one win.
    """
    lines: dict[str, str] = {}
    merged: dict[str, str] = {}
    for key, value in node.value:
        if key.tag == _MERGE_TAG:
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in parts:
                if isinstance(part, yaml.MappingNode):
                    merged |= _key_lines(part, file, prefix)
            continue
        name = f"{prefix}{key.value}"
        line = f"{file}:{key.start_mark.line + 1}"
        if name in lines:
            raise UserError(f"{line}: {name} is given twice; keep one")
        lines[name] = line
        if isinstance(value, yaml.MappingNode) and not prefix:
            lines |= _key_lines(value, file, f"{name}.")
    return merged | lines


# --- names


def _check_keys(content: Mapping[str, Any], lines: Mapping[str, str]) -> None:
    """Raise UserError for wrong keys, all at once, a line for each."""
    wrong = list(_wrong_keys(content, lines))
    if wrong:
        raise UserError("\n".join(wrong))


def _wrong_keys(content: Mapping[str, Any], lines: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with each key that is no setting of its section."""
    sections = section_types()
    for key, value in content.items():
        if key in sections:
            if value is not None and not isinstance(value, dict):
                own = f": write {key}: {{{key}: {as_flag_text(value)}}}" if key in flat_names() else ""
                yield f"{lines[key]}: {key} is a section; its settings go below it, indented{own}"
                continue
            for name, setting_value in (value or {}).items():
                if flat_names().get(name) != key:
                    yield _unknown_key(name, setting_value, lines[f"{key}.{name}"], key)
        elif flat_names().get(key) != "":
            yield _unknown_key(key, value, lines[key], "")


def _unknown_key(name: str, value: Any, line: str, section: str) -> str:
    """Return the most helpful answer to a key that is not a setting of its section."""
    if name in section_types() and (isinstance(value, dict) or name not in flat_names()):
        return f"{line}: {name} is a section of its own; it begins at the top level, not below {section}"
    if name in flat_names():
        return f"{line}: {name} belongs {_place(name)}"
    near = nearest(name, [*flat_names(), *section_types()])
    # A mapping is a section: ``optimizer:`` with settings below it means ``optim:``.
    means_section = isinstance(value, dict) and near in section_types()
    advice = None if means_section else foreign_name_advice(name, value, "yaml")
    if advice:
        return f"{line}: unknown setting {name!r}; {advice}"
    if near:
        in_place = near in section_types() or flat_names()[near] == section
        place = "" if in_place else f" {_place(near)}"
        return f"{line}: unknown setting {name!r} (did you mean {near!r}{place}?)"
    known = [setting for setting, home in flat_names().items() if home == section]
    if not section:
        known += section_types()
    where = f"in {section}" if section else "here"
    return f"{line}: unknown setting {name!r}; known {where}: {', '.join(known)}"


def _place(name: str) -> str:
    section = flat_names()[name]
    return f"under {section}:" if section else "at the top level"


# --- values


def _build(content: Mapping[str, Any], lines: Mapping[str, str], file: str) -> Config:
    """Return the config. Each error names the line of its cause."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, value in content.items():
        in_section = key in section_types()
        for name, given in (value or {}).items() if in_section else [(key, value)]:
            full_name = f"{key}.{name}" if in_section else name
            places[name] = lines[full_name]
            try:
                values[name] = as_declared(full_name, setting_types()[name], given)
            except UserError as error:
                raise UserError(f"{places[name]}: {error}") from None
    try:
        return Config().but(**values)
    except UserError as error:
        # The checks begin their message with the name of a setting, if one is the cause.
        culprit = str(error).split()[0].rstrip(",")
        raise UserError(f"{places.get(culprit, file)}: {error}") from None
