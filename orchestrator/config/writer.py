"""A config in other forms: as YAML that reads back, as JSON values, and with absolute paths; the text of each
setting."""

from __future__ import annotations

import ast
import glob
import inspect
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.reading.reader import Resolved
from orchestrator.config.sections.parallel import PLACEMENTS
from orchestrator.config.settings import Config, flat_names, section_types
from orchestrator.redaction import Secrets, mask, mask_tree
from orchestrator.storage.address import as_url, location_text
from orchestrator.storage.local_files import write_whole


def write_file(resolved: Resolved, path: Path, secrets: Secrets = ()) -> None:
    """Write the whole config as YAML. It reads back to the same config, except for masked secrets.

    A kill leaves the whole file or none: a resumed run takes its settings from it."""
    write_whole(path, dump(resolved, secrets=secrets))


def dump(resolved: Resolved, comments: Mapping[str, str] | None = None, secrets: Secrets = ()) -> str:
    """Return the config as YAML; the comment of a setting is the given one, or else its origin."""
    if comments is None:
        comments = {name: resolved.origin(name) for name in flat_names()}
    comments = {name: mask(comment, secrets) for name, comment in comments.items()}
    lines = [_yaml_line("task", mask(resolved.config.task, secrets), comments.get("task", ""))]
    for section in section_types():
        lines += ["", f"{section}:"]
        settings = getattr(resolved.config, section)
        for field in fields(settings):
            value = mask_tree(_to_json(getattr(settings, field.name)), secrets)
            lines.append("  " + _yaml_line(field.name, value, comments.get(field.name, "")))
    return "\n".join(lines) + "\n"


def _yaml_line(name: str, value: Any, comment: str) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
    # One line: a comment with a line break would become a setting.
    return f"{name}: {text}" + (f"  # {' '.join(comment.split())}" if comment else "")


def to_json(config: Config) -> dict[str, Any]:
    """Return the config as a tree of JSON values."""
    return _to_json(asdict(config))


def flat_values(config: Config) -> dict[str, Any]:
    """Return every setting by its flat name, as a JSON value."""
    tree = to_json(config)
    return {name: tree[section][name] if section else tree[name] for name, section in flat_names().items()}


def changed_settings(config: Config) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by flat name, as JSON values."""
    defaults = flat_values(Config())
    return {name: value for name, value in flat_values(config).items() if value != defaults[name]}


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_to_json(entry) for entry in value]
    return location_text(value) if isinstance(value, Path) else value


def with_absolute_paths(config: Config, folder: Path) -> Config:
    """Return the config with relative paths taken from ``folder``: workers may have another
    working folder."""
    values = {name: config.value_of(name) for name in flat_names()}
    changes: dict[str, Any] = {
        name: _absolute(value, folder) for name, value in values.items() if isinstance(value, Path)
    }
    # Two settings are a word or a path, and therefore declared as text.
    for name, words in (("resume", (None, "auto")), ("placement", PLACEMENTS)):
        if values[name] not in words:
            changes[name] = str(_absolute(values[name], folder))
    # The model and the documents of the task lm, unless they are ids on the hub.
    if config.model.model is not None:
        changes["model"] = _absolute_input(config.model.model, folder)
    for name in ("data", "validation_data"):
        changes[name] = tuple(_absolute_input(location, folder) for location in values[name])
    return config.but(**changes)


def _absolute_input(location: str, folder: Path) -> str:
    is_path = glob.has_magic(location) or (folder / location).exists()
    return str(_absolute(location, folder)) if is_path else location


def _absolute(location: str | Path, folder: Path) -> str | Path:
    """Return a path taken from ``folder``; an address stays as it is."""
    return location if as_url(location) else folder / location


# --- the documentation of each setting, read from the source that declares it


def setting_texts() -> dict[str, str]:
    """Return the text under each setting, by its flat name.

    ``orchestrator init`` writes these texts as comments, and ``docs/generate_settings.py`` writes them into
    ``docs/settings.md``."""
    texts: dict[str, str] = {}
    for kind in (Config, *section_types().values()):
        texts |= field_texts(kind)
    return texts


def field_texts(kind: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, on one line."""
    (declaration,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(declaration, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, following in zip(declaration.body, declaration.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[field.target.id] = " ".join(str(following.value.value).split())
    return texts
