"""From a YAML file and flags to one frozen Config, with the origin of every value.

Names are checked before anything else, in the file and among the flags alike, so that a wrong one is answered with the
nearest known name, the section it belongs to, or our word for an old spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml

from orchestrator.config import spellings
from orchestrator.config.checks import Switch
from orchestrator.config.parallel import PLACEMENTS
from orchestrator.config.safe_yaml import MOST_CHARACTERS, composed
from orchestrator.config.settings import Config, flat_names, nearest, section_types, setting_types
from orchestrator.config.values import as_declared
from orchestrator.errors import UserError
from orchestrator.redaction import Secrets, mask, mask_tree

Options = TypeVar("Options")
Origins = Mapping[str, str]

_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
_TRUTHS = frozenset(("true", "false", "yes", "no", "on", "off", "0", "1"))


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
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise UserError(
            f"cannot read the config {path}: {error.strerror or error}; give the path of a YAML file to --config"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"the config {path} is not UTF-8 text; give a YAML file to --config") from None
    content, lines = _parse(text, path.name)
    _check_keys(content, lines)
    origins = {
        name.rpartition(".")[2]: f"file {where}"
        for name, where in lines.items()
        if name not in section_types()
    }
    return Resolved(_build(content, lines, path.name), origins)


class _Loader(yaml.SafeLoader):
    """The safe loader, with two things mended: a key is text even if it looks like a truth value or a number, and a value
    that cannot be made (a 13th month) is told with its line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                key.tag = _TEXT
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


def _parse(text: str, file: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of a YAML text, and where each key stands: {'optim.learning_rate': 'cfg.yaml:3'}."""
    try:
        loader = _Loader(text)
        node = composed(loader)
        lines = _lines(node, file) if isinstance(node, yaml.MappingNode) else {}
        content = loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise UserError(
            f"{file}{where} is not YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"
        ) from None
    except RecursionError:
        raise UserError(
            f"{file} is nested too deeply; two levels were needed, see 'orchestrator init'"
        ) from None
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise UserError(
            f"{file} holds a {type(content).__name__}; a mapping of sections was needed, see 'orchestrator init'"
        )
    return content, lines


def _lines(node: yaml.MappingNode, file: str, prefix: str = "") -> dict[str, str]:
    """Where the keys of the first two levels stand. Merged ones (``<<: *other``) may be given again."""
    found: dict[str, str] = {}
    merged: dict[str, str] = {}
    for key, value in node.value:
        if key.tag == _MERGE:
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                merged |= _lines(part, file, prefix) if isinstance(part, yaml.MappingNode) else {}
            continue
        name = f"{prefix}{key.value}"
        if name in found:
            raise UserError(f"{file}:{key.start_mark.line + 1}: {name} is given twice; keep one")
        found[name] = f"{file}:{key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode) and not prefix:
            found |= _lines(value, file, f"{name}.")
    return merged | found


def _check_keys(content: Mapping[str, Any], lines: Mapping[str, str]) -> None:
    sections = section_types()
    for key, value in content.items():
        if key in sections:
            if value is not None and not isinstance(value, dict):
                raise UserError(f"{lines[key]}: {key} is a section; its settings go below it, indented")
            for name, inner in (value or {}).items():
                if flat_names().get(name) != key:
                    raise _unknown(name, inner, lines[f"{key}.{name}"], key)
        elif flat_names().get(key) != "":
            raise _unknown(key, value, lines[key], "")


def _unknown(name: str, value: Any, where: str, section: str) -> UserError:
    """The most helpful answer to a key that does not belong where it stands."""
    if name in flat_names():
        return UserError(f"{where}: {name} belongs {_place(name)}")
    if name in section_types():
        return UserError(
            f"{where}: {name} is a section of its own; it begins at the top level, not below {section}"
        )
    advice = spellings.answer(name, _as_written(value), flag=False)
    if advice:
        return UserError(f"{where}: unknown setting {name!r}; {advice}")
    near = nearest(name, [*flat_names(), *section_types()])
    if near:
        place = "" if near in section_types() or flat_names()[near] == section else f" {_place(near)}"
        return UserError(f"{where}: unknown setting {name!r} (did you mean {near!r}{place}?)")
    known = [n for n, s in flat_names().items() if s == section] + ([] if section else list(section_types()))
    return UserError(
        f"{where}: unknown setting {name!r}; known {f'in {section}' if section else 'here'}: {', '.join(known)}"
    )


def _as_written(value: Any) -> str | None:
    """A value of YAML as one would give it to a flag."""
    if isinstance(value, list):
        return ",".join(str(inner) for inner in value)
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


def _place(name: str) -> str:
    return f"under {flat_names()[name]}:" if flat_names()[name] else "at the top level"


def _build(content: Mapping[str, Any], lines: Mapping[str, str], file: str) -> Config:
    """The config, each mistake told with the line it stands in."""
    made: dict[str, Any] = {}
    for key, value in content.items():
        if key not in section_types():
            made[key] = _declared(key, key, value, lines)
            continue
        values = {
            name: _declared(f"{key}.{name}", name, inner, lines) for name, inner in (value or {}).items()
        }
        try:
            made[key] = section_types()[key](**values)
        except ValueError as error:
            at = next(
                (lines[f"{key}.{name}"] for name in values if str(error).startswith(f"{name} ")), lines[key]
            )
            raise UserError(f"{at}: {error}") from None
    try:
        return Config(**made)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None


def _declared(full: str, name: str, value: Any, lines: Mapping[str, str]) -> Any:
    try:
        return as_declared(full, setting_types()[name], value)
    except UserError as error:
        raise UserError(f"{lines[full]}: {error}") from None


def read_flags(options: type[Options], argv: Sequence[str], prog: str) -> tuple[Options, Resolved]:
    """A verb's options from its flags, laid over the file that ``--config`` names. ``options`` has a field ``settings``."""
    import tyro

    check_flags(argv, [f.name for f in fields(options) if f.name != "settings"])  # pyright: ignore[reportArgumentType]
    path = _config_path(argv)
    base = read_file(path) if path else Resolved(Config(), {})
    result = tyro.cli(
        options,
        args=list(_lists_apart(argv)),
        default=options(settings=base.config),  # pyright: ignore[reportCallIssue]
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
        prog=prog,
    )
    config: Config = result.settings  # pyright: ignore[reportAttributeAccessIssue]
    given = {
        _setting_of(token): f"flag {token.partition('=')[0]}" for token in argv if token.startswith("--")
    }
    origins = dict(base.origins) | {name: text for name, text in given.items() if name in flat_names()}
    resolved = Resolved(config, origins)
    _check_cluster(resolved)
    return result, resolved


def _check_cluster(resolved: Resolved) -> None:
    """A run shows the user's token to the cluster that it joins: which one that is, a file of someone else's does not say."""
    address, origin = resolved.config.parallel.ray_address, resolved.origin("ray_address")
    if origin.startswith("file") and address not in ("auto", "local"):
        raise UserError(
            f"{origin.removeprefix('file ')}: ray_address is {address!r}; a file may say auto or local, and which cluster a run joins, and "
            f"shows your token to, is yours to say: give --ray-address {address} if you know it"
        )


def _lists_apart(argv: Sequence[str]) -> Iterator[str]:
    """``--devices 0,2`` and ``--devices=0,2`` as ``--devices 0 2``, which is the form the parser knows; likewise the other lists. A
    switch that may be left to the plan is on where its flag stands alone, and off with ``no`` before it."""
    in_list = False
    for token, following in zip(argv, [*argv[1:], "--"], strict=False):
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            setting = _setting_of(token)
            if setting_types().get(setting) == Switch and not equals:
                off = setting != name[2:].replace("-", "_")
                yield f"--{setting.replace('_', '-')}"
                if off or following.startswith("--"):
                    yield "off" if off else "on"
                in_list = False
                continue
            in_list = get_origin(setting_types().get(_setting_of(token))) is tuple
            yield from [name, *value.split(",")] if in_list and equals else [token]
        else:
            yield from token.split(",") if in_list else [token]


def check_flags(argv: Sequence[str], own: Iterable[str]) -> None:
    """Refuse unknown flags before the parser sees them, with the nearest known one or our word for an old spelling."""
    known = {*flat_names(), *own, "help", "config"}
    for position, token in enumerate(argv):
        if not token.startswith("--") or token == "--":
            continue
        name, _, value = token[2:].partition("=")
        following = (
            argv[position + 1]
            if position + 1 < len(argv) and not argv[position + 1].startswith("--")
            else None
        )
        setting = _setting_of(token)
        if setting in known or name.replace("-", "_") in known:
            negated = setting_types().get(setting) == Switch and name.replace("-", "_") != setting
            if (setting_types().get(setting) is bool or negated) and (
                value or following or ""
            ).lower() in _TRUTHS:
                flag = setting.replace("_", "-")
                raise UserError(
                    f"--{name} takes no value, but {value or following!r} follows; write --{flag} or --no-{flag}"
                )
            continue
        advice = spellings.answer(name, value or following, flag=True)
        if advice:
            raise UserError(f"unknown flag --{name}; {advice}")
        raise UserError(f"unknown flag --{name}{_nearest_flag(name, known)}; see --help")


def _nearest_flag(name: str, known: Iterable[str]) -> str:
    near = nearest(name.replace("-", "_"), known)
    return f" (did you mean --{near.replace('_', '-')}?)" if near else ""


def _setting_of(token: str) -> str:
    """``--no-compile=x`` -> ``compile``."""
    name = token[2:].partition("=")[0].replace("-", "_")
    return name.removeprefix("no_") if name not in flat_names() else name


def _config_path(argv: Sequence[str]) -> Path | None:
    """The file that ``--config`` names; the last one, as with every flag."""
    found: Path | None = None
    for position, token in enumerate(argv):
        if token == "--config":
            if position + 1 == len(argv) or argv[position + 1].startswith("--"):
                raise UserError("--config needs the path of a YAML file")
            found = Path(argv[position + 1])
        if token.startswith("--config="):
            found = Path(token.partition("=")[2])
    return found


def write_file(
    resolved: Resolved, path: Path, comments: Mapping[str, str] | None = None, secrets: Secrets = ()
) -> None:
    """The whole config as YAML that reads back to the same config but for its secrets, each value with its origin (or the comment
    given)."""
    path.write_text(dump(resolved, comments, secrets), encoding="utf-8")


def dump(resolved: Resolved, comments: Mapping[str, str] | None = None, secrets: Secrets = ()) -> str:
    notes = comments if comments is not None else {name: resolved.origin(name) for name in flat_names()}
    notes = {name: mask(note, secrets) for name, note in notes.items()}
    lines = [_yaml_line("task", mask(resolved.config.task, secrets), notes.get("task", ""))]
    for section in section_types():
        lines += ["", f"{section}:"]
        values = getattr(resolved.config, section)
        shown = {f.name: mask_tree(_plain(getattr(values, f.name)), secrets) for f in fields(values)}
        lines += ["  " + _yaml_line(name, value, notes.get(name, "")) for name, value in shown.items()]
    return "\n".join(lines) + "\n"


def _yaml_line(name: str, value: Any, comment: str) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
    return f"{name}: {text}" + (f"  # {' '.join(comment.split())}" if comment else "")


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
        paths = {
            f.name: getattr(values, f.name)
            for f in fields(values)
            if isinstance(getattr(values, f.name), Path)
        }
        if paths:
            changes[section] = replace(values, **{name: folder / path for name, path in paths.items()})
    config = replace(config, **changes)
    if config.checkpoint.resume not in (None, "auto"):
        config = config.but(resume=str(folder / str(config.checkpoint.resume)))
    placement = config.parallel.placement
    return config if placement in PLACEMENTS else config.but(placement=str(folder / placement))


def read_own(
    options: type[Options], argv: Sequence[str], prog: str, positional: str | None = None
) -> Options:
    """The options of a verb that takes no settings. ``positional`` names the one that may be given without its flag."""
    import tyro

    arguments = list(argv)
    if positional and arguments and not arguments[0].startswith("-"):
        arguments.insert(0, f"--{positional}")
    known = {f.name for f in fields(options)}  # pyright: ignore[reportArgumentType]
    for token in arguments:
        name = token[2:].partition("=")[0].replace("-", "_")
        if token.startswith("--") and {name, name.removeprefix("no_")}.isdisjoint({*known, "help"}):
            raise UserError(
                f"unknown flag {token.partition('=')[0]}{_nearest_flag(name, known)}; see {prog} --help"
            )
    return tyro.cli(options, args=arguments, prog=prog)
