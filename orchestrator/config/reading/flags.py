"""Reads the flags of a verb, laid over the file that ``--config`` names.

Unknown flags are refused before values are read, all at once: the answer names the nearest known
flag, or our name for a flag of another trainer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_origin

from orchestrator.config.names.nearest import nearest
from orchestrator.config.reading.flag_values import FlagGrammar, changed_config
from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.config.sections.checks import Switch
from orchestrator.config.settings import Config, flat_names, foreign_name_advice, setting_types
from orchestrator.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
Positional = str | Sequence[str] | None
"""Options that may be given without their flags."""

_NEGATIVE_NUMBER = re.compile(r"-\.?\d.*")
_HELP = frozenset(("--help", "-h"))
_TRUTH_VALUES = frozenset(("true", "false", "yes", "no", "on", "off", "0", "1"))


def read_flags(
    options: type[Options], argv: Sequence[str], prog: str, positional: Positional = None
) -> tuple[Options, Resolved]:
    """Read the options of a verb that takes settings, and the settings with their origins.

    ``options`` is a dataclass with a field ``settings: Config``, whose settings become flags
    without a prefix. ``positional`` names the option that may be given without its flag.
    """
    grammar = FlagGrammar(prog, options)
    arguments = _with_positional(argv, positional, grammar.types)
    check_flags(arguments, grammar.own_types)
    path = _config_path(arguments)
    base = read_file(path) if path else Resolved(Config(), {})
    if not _HELP.isdisjoint(arguments):
        _show_help(grammar, positional, base.config)
    given = grammar.values(arguments)
    settings = {name: value for name, value in given.items() if name in flat_names()}
    config = changed_config(base.config, settings)
    flags = {_setting_of(token): token.partition("=")[0] for token in arguments if token.startswith("--")}
    origins = {name: f"flag {flag}" for name, flag in flags.items() if name in settings}
    resolved = Resolved(config, {**base.origins, **origins})
    _check_cluster(resolved)
    own = {name: value for name, value in given.items() if name not in settings}
    return options(settings=config, **own), resolved  # pyrefly: ignore[unexpected-keyword]


def read_options(
    options: type[Options], argv: Sequence[str], prog: str, positional: Positional = None
) -> Options:
    """Read the options of a verb that takes no settings.

    ``positional`` names the options that may be given without their flags.
    """
    grammar = FlagGrammar(prog, options)
    arguments = _with_positional(argv, positional, grammar.types)
    known = grammar.own_types
    for token in arguments:
        name = token[2:].partition("=")[0].replace("-", "_")
        if token.startswith("--") and {name, name.removeprefix("no_")}.isdisjoint({*known, "help"}):
            flag = token.partition("=")[0]
            raise UserError(f"unknown flag {flag}{_nearest_flag(name, known)}; see {prog} --help")
    if not _HELP.isdisjoint(arguments):
        _show_help(grammar, positional, None)
    return options(**grammar.values(arguments))


def _show_help(grammar: FlagGrammar, positional: Positional, base: Config | None) -> NoReturn:
    """Print every flag of a verb with its meaning and its default, then exit.

    tyro makes the help from the dataclasses. It reads no values: importing it and building its parser
    takes longer than the rest of the start."""
    import tyro

    tyro.cli(
        grammar.options,
        args=["--help"],
        default=None if base is None else grammar.options(settings=base),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff) if base else (),
        prog=_usage(grammar.prog, positional, grammar.types),
    )
    raise AssertionError("--help ends the program")


def _usage(prog: str, positional: Positional, types: Mapping[str, Any]) -> str:
    """Return the command with the options that need no flags, as its help shows it."""
    more = {name: " ..." if get_origin(types[name]) is tuple else "" for name in _as_names(positional)}
    return " ".join([prog, *(f"[{name.upper()}{dots}]" for name, dots in more.items())])


def _as_names(positional: Positional) -> list[str]:
    return [positional] if isinstance(positional, str) else list(positional or ())


def _with_positional(argv: Sequence[str], positional: Positional, types: Mapping[str, Any]) -> list[str]:
    """Return the arguments with flags before values that have none, wherever they are."""
    names = _as_names(positional)
    takes_more = bool(names) and get_origin(types[names[-1]]) is tuple
    leading: list[str] = []
    rest: list[str] = []
    num_values = 0.0  # that the last flag still takes
    for token in argv:
        is_negative_number = bool(num_values) and _NEGATIVE_NUMBER.fullmatch(token) is not None
        if token.startswith("-") and not is_negative_number:
            rest.append(token)
            num_values = _num_values(token, types)
        elif num_values:
            rest.append(token)
            num_values -= 1
        elif names:
            leading += [f"--{names.pop(0)}", token]
        else:
            (leading if takes_more else rest).append(token)
    return [*leading, *rest]


def _num_values(flag: str, types: Mapping[str, Any]) -> float:
    """Return the most values that may follow a flag."""
    name = flag[2:].replace("-", "_")
    hint = types.get(name, types.get(name.removeprefix("no_")))
    if "=" in flag or hint is bool:
        return 0
    return math.inf if hint == Switch or get_origin(hint) is tuple else 1


def check_flags(argv: Sequence[str], own_flags: Iterable[str]) -> None:
    """Raise UserError for unknown flags, all at once, and for a value after a switch that takes none."""
    known = {*flat_names(), *own_flags, "help", "config"}
    unknown: dict[str, str] = {}
    for token, following in pairwise([*argv, "--"]):
        if not token.startswith("--") or token == "--":
            continue
        name, _, value = token[2:].partition("=")
        if not value and not following.startswith("--"):
            value = following
        if _setting_of(token) in known or name.replace("-", "_") in known:
            _check_switch(token, name, value)
            continue
        advice = foreign_name_advice(name, value or None, "flag")
        hint = f"; {advice}" if advice else f"{_nearest_flag(name, known)}; see --help"
        unknown.setdefault(name, f"unknown flag --{name}{hint}")
    if unknown:
        raise UserError("\n".join(unknown.values()))


def _check_switch(token: str, name: str, value: str) -> None:
    """Raise UserError for ``--profile true`` and ``--no-compile 1``, which says what to write instead."""
    setting = _setting_of(token)
    hint = setting_types().get(setting)
    negated = hint == Switch and name.replace("-", "_") != setting
    if (hint is bool or negated) and value.lower() in _TRUTH_VALUES:
        flag = setting.replace("_", "-")
        raise UserError(f"--{name} takes no value, but {value!r} follows; write --{flag} or --no-{flag}")


def _check_cluster(resolved: Resolved) -> None:
    """Raise UserError if a file names the cluster to join.

    A run shows the user's token to the cluster that it joins, and the file may be another person's.
    """
    address = resolved.config.parallel.ray_address
    origin = resolved.origin("ray_address")
    if origin.startswith("file") and address not in ("auto", "local"):
        raise UserError(
            f"{origin.removeprefix('file ')}: ray_address is {address!r}; "
            "a file may say auto or local only, because "
            f"a run shows your token to the cluster that it joins: give --ray-address {address} if you "
            "know it"
        )


def _nearest_flag(name: str, known: Iterable[str]) -> str:
    near = nearest(name.replace("-", "_"), known)
    return f" (did you mean --{near.replace('_', '-')}?)" if near else ""


def _setting_of(token: str) -> str:
    """Return the setting of a flag: '--no-compile=x' -> 'compile'."""
    name = token[2:].partition("=")[0].replace("-", "_")
    return name if name in flat_names() else name.removeprefix("no_")


def _config_path(argv: Sequence[str]) -> Path | None:
    """Return the file that ``--config`` names; the last one, as with every flag."""
    path: Path | None = None
    for token, following in pairwise([*argv, "--"]):
        if token == "--config":
            if following.startswith("--"):
                raise UserError("--config needs the path of a YAML file")
            path = Path(following)
        if token.startswith("--config="):
            path = Path(token.partition("=")[2])
    return path
