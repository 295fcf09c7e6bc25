"""Parses search spaces, from flags (``batch-size=16,64 learning-rate=1e-4..1e-2:log``), YAML
files and ledgers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.config.reading.safe_yaml import MAX_CHARACTERS, safe_content
from orchestrator.config.settings import Config, flat_names, foreign_name_advice, setting_types
from orchestrator.config.sweep.space import (
    MAX_POINTS,
    Domain,
    Point,
    Range,
    Space,
    Values,
    is_number,
    point_key,
)
from orchestrator.config.values import as_declared
from orchestrator.errors import UserError
from orchestrator.types import flag_of

_RANGE = re.compile(r"(?P<low>[^.]*(?:\.\d[^.]*)?)\.\.(?P<high>[^:]+)(?::(?P<how>.+))?")
_FORM = "values as 16,64,256, a range with steps as 16..256:x2 or 1..9:2, or a range as 1e-4..1e-2:log"
_NOT_SWEPT = {
    "task", "name", "run_dir", "resume", "init_from", "ray_address", "trackers", "debug", "auto", "profile",
    "devices", "gpu_mode", "metrics_port", "metrics_address",
}  # fmt: skip


def parse_space(entries: Sequence[str]) -> Space:
    """Return the space of ``NAME=DOMAIN`` entries."""
    domains: list[tuple[str, str, str]] = []
    for entry in entries:
        name, _, text = entry.partition("=")
        if not text:
            raise UserError(
                f"--sweep {entry!r}: a setting and its values were needed, as batch-size=16,64; {_FORM}"
            )
        domains.append((name, text, f"--sweep {name}={text}"))
    return _space(domains)


def read_space(path: Path) -> Space:
    """Return the space of a YAML file.

    The file is a mapping of each setting to a list of values, one value, or a text as for
    ``--sweep``; or a list of points, each a mapping of settings to values.
    """
    try:
        with path.open(encoding="utf-8") as file:
            content = safe_content(file.read(MAX_CHARACTERS + 1))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = f"write --sweep {path}" if "=" in path.name else "give a YAML file to --space"
        raise UserError(f"cannot read the space {path}: {reason}; {advice}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    if isinstance(content, list) and content and all(isinstance(point, dict) and point for point in content):
        return points_space(content, path.name)
    if not isinstance(content, dict) or not content:
        raise UserError(
            f"{path} holds no space; a mapping of settings was needed, "
            "as 'batch_size: [16, 64]' or 'learning_rate: 1e-4..1e-2:log'"
        )
    return _space((str(name), value, f"{path.name}: {name}") for name, value in content.items())


def space_from_json(domains: Mapping[str, Any]) -> Space:
    """Return the space that ``Space.to_json`` wrote."""
    source = "the ledger"
    parsed: dict[str, Domain] = {}
    for key, domain in domains.items():
        name = _setting(key, source)
        # A range goes through its text, so that the same checks apply: a ledger may say anything.
        value = Range(**domain).text() if isinstance(domain, Mapping) else list(domain)
        parsed[name] = _domain(name, value, source)
    return Space(parsed)


def points_space(points: Sequence[Mapping[Any, Any]], source: str) -> Space:
    """Return the space of these points only; equal ones count once."""
    named = [{_setting(str(key), source): value for key, value in point.items()} for point in points]
    parsed = [
        {name: _value(name, value, f"{source}, point {number}") for name, value in point.items()}
        for number, point in enumerate(named, 1)
    ]
    unique: dict[str, Point] = {}
    values: dict[str, dict[Any, None]] = {}
    for point in parsed:
        unique.setdefault(point_key(point), point)
        for name, value in point.items():
            values.setdefault(name, {})[value] = None
    domains = {name: Values(tuple(entries)) for name, entries in values.items()}
    return Space(domains, tuple(unique.values()))


def _space(entries: Iterable[tuple[str, Any, str]]) -> Space:
    """Return the space of triples: the name of a setting, its domain, and the source for error messages."""
    domains: dict[str, Domain] = {}
    for key, value, source in entries:
        name = _setting(key, source)
        if name in domains:
            raise UserError(f"{source}: {name} is given twice; put all its values into one list")
        domains[name] = _domain(name, value, source)
    if not domains:
        raise UserError(f"nothing to sweep: give --sweep NAME=VALUES, or --space FILE; {_FORM}")
    return Space(domains)


def _setting(key: str, source: str) -> str:
    """Return the name of the setting that a key means."""
    name = key.strip().lstrip("-").replace("-", "_")
    if name in _NOT_SWEPT:
        raise UserError(
            f"{source}: {name} is not swept over, it is the same for all trials; give it as {flag_of(name)}"
        )
    if name in flat_names():
        return name
    advice = foreign_name_advice(name, None, "python")
    hint = f"; {advice}" if advice else did_you_mean(name, flat_names())
    raise UserError(f"{source}: unknown setting {name!r}{hint}")


def _domain(name: str, value: Any, source: str) -> Domain:
    if isinstance(value, str) and ".." in value:
        return _range(name, value, source)
    if isinstance(value, str):
        entries = [part.strip() for part in value.split(",")]
    else:
        entries = value if isinstance(value, list) else [value]
    values = dict.fromkeys(_value(name, entry, source) for entry in entries)
    if not values:
        raise UserError(f"{source}: no values; {_FORM}")
    return Values(tuple(values))


def _value(name: str, value: Any, source: str) -> Any:
    is_null = isinstance(value, str) and value.lower() in ("none", "null")
    try:
        parsed = as_declared(name, setting_types()[name], None if is_null else value)
        if is_number(parsed):
            # A number out of range is reported now, instead of by every trial.
            Config().but(**{name: parsed})
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if (name, parsed) == ("batch_size", "auto"):
        raise UserError(f"{source}: auto measures a batch size by itself; give the sizes to try")
    return parsed


# --- ranges


def _range(name: str, text: str, source: str) -> Domain:
    """Return ``LOW..HIGH`` as a uniform range, with ``:log`` as a log-uniform one, with
    ``:STEP`` or ``:xFACTOR`` as values."""
    match = _RANGE.fullmatch(text.strip())
    hint = setting_types()[name]
    types = {hint, *get_args(hint)}
    if match is None or not types & {int, float}:
        needed = _FORM if types & {int, float} else f"a list of values: {name} is no number"
        raise UserError(f"{source}: not understood; give {needed}")
    low = _number(match["low"], source)
    high = _number(match["high"], source)
    if not low < high:
        raise UserError(
            f"{source}: the range runs from {match['low']} to {match['high']}; the lower end goes first"
        )
    how = match["how"] or ""
    integer = float not in types
    if how in ("", "log"):
        if how == "log" and low <= 0:
            raise UserError(f"{source}: a logarithmic range begins above 0, not at {match['low']}")
        for end in (low, high):
            _value(name, round(end) if integer else end, source)
        return Range(low, high, how == "log", integer)
    numbers = _stepped(low, high, how, source)
    values = dict.fromkeys(_value(name, round(number) if integer else number, source) for number in numbers)
    return Values(tuple(values))


def _stepped(low: float, high: float, how: str, source: str) -> list[float]:
    """Return the numbers from low to high, in steps of ``how``: ``2`` adds 2, ``x2`` multiplies by 2."""
    multiply = how.startswith("x")
    step = _number(how.removeprefix("x"), source)
    if (multiply and (step <= 1 or low <= 0)) or step <= 0:
        raise UserError(
            f"{source}: steps of {how} lead nowhere; "
            "a step above 0, or a factor above 1 from a positive beginning, was needed"
        )
    steps = math.log(high / low) / math.log(step) if multiply else (high - low) / step
    count = math.floor(steps + 1e-9)  # the upper end counts, whichever way it was rounded
    if count > MAX_POINTS:
        raise UserError(f"{source}: {count:,} steps; at most {MAX_POINTS:,} make sense")
    if multiply:
        return [low * step**index for index in range(count + 1)]
    return [low + step * index for index in range(count + 1)]


def _number(text: str, source: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{source}: {text!r} is no number; {_FORM}")
    return number
