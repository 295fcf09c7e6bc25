"""From a YAML file and flags to one frozen Config, with the origin of every value.

Names are checked before anything else, in the file and among the flags alike, so that a wrong one is answered with the
nearest known name, the section it belongs to, or our word for an old spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from orchestrator.config import spellings
from orchestrator.config.settings import Config, Switch, did_you_mean, flat_names, section_types
from orchestrator.errors import UserError

Options = TypeVar("Options")
Origins = Mapping[str, str]


@dataclass(frozen=True)
class Resolved:
    """A config and where each of its values came from: ``default``, ``file NAME:LINE`` or ``flag --NAME``."""

    config: Config
    origins: Origins

    def origin(self, name: str) -> str:
        return self.origins.get(name, "default")


def read_file(path: Path) -> Resolved:
    """The config of a YAML file; what it leaves out is default."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror or error}; give the path of a YAML file to --config") from None
    except UnicodeDecodeError:
        raise UserError(f"the config {path} is not UTF-8 text; give a YAML file to --config") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path.name}{where} is not YAML: {getattr(error, 'problem', None) or error}") from None
    if content is None:
        return Resolved(Config(), {})
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path.name} holds a {type(content).__name__}; a mapping of sections was needed, see 'orchestrator init'")
    lines = _lines(node, path.name)
    _check_keys(content, lines)
    config = _validate({key: _prepare(key, value) for key, value in content.items()}, lines)
    return Resolved(config, {name.rpartition(".")[2]: f"file {where}" for name, where in lines.items() if name not in section_types()})


def _lines(node: yaml.MappingNode, file: str, prefix: str = "") -> dict[str, str]:
    """Where each key stands: {'optim.learning_rate': 'cfg.yaml:3'}."""
    found: dict[str, str] = {}
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if name in found:
            raise UserError(f"{file}:{key.start_mark.line + 1}: {name} is given twice; keep one")
        found[name] = f"{file}:{key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode):
            found |= _lines(value, file, f"{name}.")
    return found


def _check_keys(content: Mapping[Any, Any], lines: Mapping[str, str]) -> None:
    sections = section_types()
    for key, value in content.items():
        if key in sections:
            if value is not None and not isinstance(value, dict):
                raise UserError(f"{lines[str(key)]}: {key} is a section; its settings go below it, indented")
            for name, inner in (value or {}).items():
                if flat_names().get(name) != key:
                    raise _unknown(str(name), inner, lines.get(f"{key}.{name}", ""), str(key))
        elif flat_names().get(key) != "":
            raise _unknown(str(key), value, lines.get(str(key), ""), "")


def _unknown(name: str, value: Any, where: str, section: str) -> UserError:
    """The most helpful answer to a key that does not belong where it stands."""
    if name in flat_names():
        home = flat_names()[name]
        return UserError(f"{where}: {name} belongs {f'under {home}:' if home else 'at the top level'}")
    text = str(value).lower() if isinstance(value, bool) else None if value is None else str(value)
    advice = spellings.answer(name, text, flag=False)
    if advice:
        return UserError(f"{where}: unknown setting {name!r}; {advice}")
    known = [*flat_names(), *section_types()]
    near = did_you_mean(name, known)
    if not near:
        near = f"; known in {section}: " + ", ".join(n for n, s in flat_names().items() if s == section) if section else ""
    return UserError(f"{where}: unknown setting {name!r}{near}")


def _prepare(key: str, value: Any) -> Any:
    """YAML's own reading mended: ``on`` and ``off`` are words here, one number may stand for a list of one, and a truth
    value is no number."""
    if key not in section_types():
        return value
    hints = get_type_hints(section_types()[key])
    return {name: _prepare_field(f"{key}.{name}", hints[name], inner) for name, inner in (value or {}).items()}


def _prepare_field(name: str, hint: Any, value: Any) -> Any:
    if isinstance(value, bool):
        if hint == Switch:
            return "on" if value else "off"
        if hint is not bool:
            raise UserError(f"{name} is {str(value).lower()}; {_needed(hint)} was needed")
    if str(hint).startswith("tuple") and value is not None and not isinstance(value, list):
        return [value]
    return value


def _needed(hint: Any) -> str:
    """A type in words, for messages."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path", type(None): "null"}
    if hint in names:
        return names[hint]
    if str(hint).startswith("tuple"):
        return f"a list of {_needed(get_args(hint)[0])}"
    parts = get_args(hint)
    return " or ".join(_needed(part) if not isinstance(part, str) else repr(part) for part in parts) if parts else str(hint)


def _validate(content: dict[str, Any], lines: Mapping[str, str]) -> Config:
    from pydantic import TypeAdapter, ValidationError  # costs 60 ms, needed for files only

    try:
        return TypeAdapter(Config).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"]]
        name = ".".join(parts[:2]) if parts and parts[0] in section_types() else ".".join(parts[:1])
        where = f"{lines[name]}: " if name in lines else ""
        if first["type"] == "value_error":
            raise UserError(f"{where}{first['msg'].removeprefix('Value error, ')}") from None
        hint = get_type_hints(section_types()[parts[0]])[parts[1]] if len(parts) > 1 and parts[0] in section_types() else str
        raise UserError(f"{where}{name} is {first['input']!r}; {_needed(hint)} was needed") from None


def read_flags(options: type[Options], argv: Sequence[str], prog: str) -> tuple[Options, Resolved]:
    """A verb's options from its flags, laid over the file that ``--config`` names. ``options`` has a field ``settings``."""
    import tyro

    check_flags(argv, [f.name for f in fields(options) if f.name != "settings"])  # pyright: ignore[reportArgumentType]
    path = _config_path(argv)
    base = read_file(path) if path else Resolved(Config(), {})
    result = tyro.cli(
        options,
        args=list(argv),
        default=options(settings=base.config),  # pyright: ignore[reportCallIssue]
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
        prog=prog,
    )
    config: Config = result.settings  # pyright: ignore[reportAttributeAccessIssue]
    given = {_setting_of(token): f"flag {token.partition('=')[0]}" for token in argv if token.startswith("--")}
    origins = dict(base.origins) | {name: text for name, text in given.items() if name in flat_names()}
    return result, Resolved(config, origins)


def check_flags(argv: Sequence[str], own: Iterable[str]) -> None:
    """Refuse unknown flags before the parser sees them, with the nearest known one or our word for an old spelling."""
    known = {*flat_names(), *own, "help", "config"}
    for position, token in enumerate(argv):
        if not token.startswith("--") or token == "--":
            continue
        name, _, value = token[2:].partition("=")
        if _setting_of(token) in known or name.replace("-", "_") in known:
            continue
        following = argv[position + 1] if position + 1 < len(argv) and not argv[position + 1].startswith("--") else None
        advice = spellings.answer(name, value or following, flag=True)
        if advice:
            raise UserError(f"unknown flag --{name}; {advice}")
        near = did_you_mean(name.replace("_", "-"), [n.replace("_", "-") for n in known]).replace("'", "")
        raise UserError(f"unknown flag --{name}{near.replace('mean ', 'mean --')}; see --help")


def _setting_of(token: str) -> str:
    """``--no-compile=x`` -> ``compile``."""
    name = token[2:].partition("=")[0].replace("-", "_")
    return name.removeprefix("no_") if name not in flat_names() else name


def _config_path(argv: Sequence[str]) -> Path | None:
    for position, token in enumerate(argv):
        if token == "--config":
            if position + 1 == len(argv):
                raise UserError("--config needs the path of a YAML file")
            return Path(argv[position + 1])
        if token.startswith("--config="):
            return Path(token.partition("=")[2])
    return None


def write_file(resolved: Resolved, path: Path, comments: Mapping[str, str] | None = None) -> None:
    """The whole config as YAML that reads back to the same config, each value with its origin (or the comment given)."""
    path.write_text(dump(resolved, comments), encoding="utf-8")


def dump(resolved: Resolved, comments: Mapping[str, str] | None = None) -> str:
    notes = comments if comments is not None else {name: resolved.origin(name) for name in flat_names()}
    lines = [_yaml_line("task", resolved.config.task, notes.get("task", ""))]
    for section in section_types():
        lines += ["", f"{section}:"]
        values = getattr(resolved.config, section)
        lines += ["  " + _yaml_line(f.name, getattr(values, f.name), notes.get(f.name, "")) for f in fields(values)]
    return "\n".join(lines) + "\n"


def _yaml_line(name: str, value: Any, comment: str) -> str:
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, Path):
        value = str(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
    return f"{name}: {text}" + (f"  # {comment}" if comment else "")


def to_json(config: Config) -> dict[str, Any]:
    """The config as plain values."""
    return _plain(asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def absolute(config: Config, folder: Path) -> Config:
    """Relative paths of the config taken from ``folder``, so that a worker with another working folder finds them."""
    changes: dict[str, Any] = {}
    for section in section_types():
        values: Any = getattr(config, section)
        paths = {f.name: getattr(values, f.name) for f in fields(values) if isinstance(getattr(values, f.name), Path)}
        if paths:
            changes[section] = replace(values, **{name: folder / path for name, path in paths.items()})
    return replace(config, **changes)


def read_own(options: type[Options], argv: Sequence[str], prog: str, positional: str | None = None) -> Options:
    """The options of a verb that takes no settings. ``positional`` names the one that may be given without its flag."""
    import tyro

    arguments = list(argv)
    if positional and arguments and not arguments[0].startswith("-"):
        arguments.insert(0, f"--{positional}")
    known = {f.name for f in fields(options)}  # pyright: ignore[reportArgumentType]
    for token in arguments:
        name = token[2:].partition("=")[0].replace("-", "_")
        if token.startswith("--") and {name, name.removeprefix("no_")}.isdisjoint({*known, "help"}):
            raise UserError(f"unknown flag {token}{did_you_mean(name, known)}; see {prog} --help")
    return tyro.cli(options, args=arguments, prog=prog)
