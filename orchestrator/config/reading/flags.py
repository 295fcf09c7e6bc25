"""Reads the flags of a verb, laid over the file that ``--config`` names.

Unknown flags are refused before values are read, all at once: the answer names the nearest known
flag, or our name for a flag of another trainer. One mistake has one answer wherever it is made: values are
checked as those of YAML files and of Python are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from orchestrator.config.names.nearest import nearest
from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.config.sections.checks import Switch
from orchestrator.config.settings import Config, flat_names, foreign_name_advice, setting_types
from orchestrator.config.values import as_declared, type_text
from orchestrator.errors import UserError
from orchestrator.types import flag_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Options = TypeVar("Options", bound="DataclassInstance")
Positional = str | Sequence[str] | None
"""Options that may be given without their flags."""

_NEGATIVE_NUMBER = re.compile(r"-\.?\d.*")
_HELP = frozenset(("--help", "-h"))
_TRUTH_VALUES = frozenset(("true", "false", "yes", "no", "on", "off", "0", "1"))


@dataclass(frozen=True)
class _Given:
    """A flag as it was given, with the values that follow it."""

    flag: str
    """Empty for values before the first flag."""
    values: list[str]


class FlagGrammar:
    """The flags of a verb: its own options, and those of the settings if it takes any."""

    def __init__(self, options: type, prog: str, positional: Positional = None) -> None:
        hints = get_type_hints(options)
        self.options = options
        self.prog = prog
        self.positional = [positional] if isinstance(positional, str) else list(positional or ())
        self.takes_settings = Config in hints.values()
        own = {name: hint for name, hint in hints.items() if hint is not Config}
        self.types: Mapping[str, Any] = {**setting_types(), **own} if self.takes_settings else own
        """The declared type of every option and setting."""

    def parse(self, argv: Sequence[str]) -> list[_Given]:
        """Return the flags with their values; values that need no flag have theirs, and come first."""
        names = list(self.positional)
        takes_more = bool(names) and get_origin(self.types[names[-1]]) is tuple
        leading: list[_Given] = []
        given = [_Given("", [])]
        num_values = 0.0  # that the last flag still takes
        for token in argv:
            is_negative_number = bool(num_values) and _NEGATIVE_NUMBER.fullmatch(token) is not None
            if token.startswith("--") and token != "--":
                flag, equals, value = token.partition("=")
                given.append(_Given(flag, [value] if equals else []))
                num_values = 0 if equals else self._num_values(flag)
            elif num_values or (token.startswith("-") and not is_negative_number):
                given[-1].values.append(token)
                num_values = max(0, num_values - 1)
            elif names:
                leading.append(_Given(flag_of(names.pop(0)), [token]))
            else:
                (leading if takes_more else given)[-1].values.append(token)
        return [*leading, *given]

    def named_by(self, flag: str) -> tuple[str, bool]:
        """Return the option or setting of a flag, and whether the flag is --no-NAME, as switches have one."""
        name = flag[2:].replace("-", "_")
        positive = name.removeprefix("no_")
        is_negated = name not in self.types and positive in self.types
        return (positive if is_negated else name), is_negated

    def _num_values(self, flag: str) -> float:
        """Return the most values that may follow a flag."""
        hint = self.types.get(self.named_by(flag)[0])
        if hint is bool:
            return 0
        return math.inf if hint == Switch or get_origin(hint) is tuple else 1

    def check(self, given: Sequence[_Given]) -> None:
        """Raise UserError for unknown flags, all at once, and for a value after a switch that takes none."""
        unknown: dict[str, str] = {}
        for each in given:
            name, is_negated = self.named_by(each.flag)
            value = each.values[0] if each.values else None
            if each.flag in _HELP and each.values:
                raise UserError(f"{each.flag} takes no value, but {each.values[0]!r} follows")
            if not each.flag or each.flag in _HELP:
                continue
            if name not in self.types:
                unknown.setdefault(each.flag, f"unknown flag {each.flag}{self._advice(each.flag, value)}")
                continue
            takes_none = self.types[name] is bool or (self.types[name] == Switch and is_negated)
            if takes_none and (value or "").lower() in _TRUTH_VALUES:
                forms = f"{flag_of(name)} or {flag_of(f'no_{name}')}"
                raise UserError(f"{each.flag} takes no value, but {value!r} follows; write {forms}")
        if unknown:
            raise UserError("\n".join(unknown.values()))

    def _advice(self, flag: str, value: str | None) -> str:
        name = flag[2:]
        advice = foreign_name_advice(name, value or None, "flag") if self.takes_settings else None
        if advice:
            return f"; {advice}"
        near = nearest(name.replace("-", "_"), [*self.types, "help"])
        return f"{f' (did you mean {flag_of(near)}?)' if near else ''}; see --help"

    def values(self, given: Sequence[_Given]) -> dict[str, Any]:
        """Return the value of each option and setting that is given; the last one, if there are several.

        Raise UserError for the first wrong value, and for required options that are missing."""
        found: dict[str, Any] = {}
        for each in given:
            if each.flag:
                name, is_negated = self.named_by(each.flag)
                if is_negated and self.types[name] not in (bool, Switch):
                    raise UserError(f"unknown flag {each.flag}: {name} is no switch; see {self.prog} --help")
                found[name] = _value(each, name, is_negated, self.types[name])
            elif each.values:
                raise UserError(f"unexpected {each.values[0]!r}; see {self.prog} --help")
        missing = [
            flag_of(field.name)
            for field in fields(self.options)
            if field.default is MISSING and field.default_factory is MISSING
            if field.name not in (*found, "settings")
        ]
        if missing:
            raise UserError(f"{', '.join(missing)} is missing; see {self.prog} --help")
        return found

    def show_help(self, base: Config | None) -> NoReturn:
        """Print every flag of a verb with its meaning and its default, then exit.

        tyro makes the help from the dataclasses. It reads no values: importing it and building its parser
        takes longer than the rest of the start."""
        import tyro

        without_flag = [
            f"[{name.upper()}{' ...' if get_origin(self.types[name]) is tuple else ''}]"
            for name in self.positional
        ]
        tyro.cli(
            self.options,
            args=["--help"],
            default=None if base is None else self.options(settings=base),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff) if base else (),
            prog=" ".join([self.prog, *without_flag]),
        )
        raise AssertionError("--help ends the program")


def _value(given: _Given, name: str, is_negated: bool, hint: Any) -> Any:
    """Return the value that a flag gives; UserError for a wrong one, a missing one, and for one too many."""
    values = given.values
    if get_origin(hint) is tuple:
        if name in flat_names():
            # --devices 0,2 is --devices 0 2; a path among a verb's own options may have a comma in it.
            values = [part for value in values for part in value.split(",")]
        return as_declared(given.flag, hint, values)
    # A switch that the plan may decide is on without a value: --compile is --compile on.
    needs_no_value = hint is bool or (hint == Switch and (is_negated or not values))
    num_allowed = 0 if needs_no_value else 1
    if len(values) > num_allowed:
        before = " ".join([given.flag, *values[:num_allowed]])
        raise UserError(f"unexpected {values[num_allowed]!r} after {before}")
    if needs_no_value:
        return not is_negated if hint is bool else "off" if is_negated else "on"
    if not values:
        raise UserError(f"{given.flag} needs a value: {type_text(hint)}")
    if values[0] == "None" and type(None) in get_args(hint):
        return None
    return as_declared(given.flag, hint, values[0])


def read_flags(
    options: type[Options], argv: Sequence[str], prog: str, positional: Positional = None
) -> tuple[Options, Resolved]:
    """Read the options of a verb that takes settings, and the settings with their origins.

    ``options`` is a dataclass with a field ``settings: Config``, whose settings become flags
    without a prefix. ``positional`` names the option that may be given without its flag.
    """
    grammar = FlagGrammar(options, prog, positional)
    given = grammar.parse(argv)
    grammar.check(given)
    base = Resolved(Config(), {})
    files = [each.values for each in given if each.flag == "--config"]
    if any(not values for values in files):
        raise UserError("--config needs the path of a YAML file")
    if files:
        base = read_file(Path(files[-1][0]))
    if not _HELP.isdisjoint(argv):
        grammar.show_help(base.config)
    values = grammar.values(given)
    settings = {name: value for name, value in values.items() if name in flat_names()}
    config = _changed_config(base.config, settings)
    flags = {grammar.named_by(each.flag)[0]: each.flag for each in given}
    resolved = Resolved(config, {**base.origins, **{name: f"flag {flags[name]}" for name in settings}})
    _check_cluster(resolved)
    own = {name: value for name, value in values.items() if name not in settings}
    return options(settings=config, **own), resolved  # pyrefly: ignore[unexpected-keyword]


def read_options(
    options: type[Options], argv: Sequence[str], prog: str, positional: Positional = None
) -> Options:
    """Read the options of a verb that takes no settings.

    ``positional`` names the options that may be given without their flags.
    """
    grammar = FlagGrammar(options, prog, positional)
    given = grammar.parse(argv)
    grammar.check(given)
    if not _HELP.isdisjoint(argv):
        grammar.show_help(None)
    return options(**grammar.values(given))


def _changed_config(base: Config, settings: Mapping[str, Any]) -> Config:
    """Return the settings with those of flags in their place; an error names the flag of its cause."""
    try:
        return base.but(**settings)
    except UserError as error:
        # The checks of a section begin their message with the name of the setting.
        name, verb, rest = str(error).partition(" is ")
        if name not in settings:
            raise
        raise UserError(f"{flag_of(name)}{verb}{rest}") from None


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
