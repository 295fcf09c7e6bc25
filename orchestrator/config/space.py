"""A search space over settings: which values each of them may take. From flags (``batch-size=16,64 learning-rate=1e-4..1e-2:log``)
or a YAML file with the same names, and to points: one value for each setting."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from orchestrator.config import spellings
from orchestrator.config.safe_yaml import MOST_CHARACTERS, safe_content
from orchestrator.config.settings import Config, did_you_mean, flat_names, setting_types
from orchestrator.config.values import as_declared
from orchestrator.errors import UserError

Point = Mapping[str, Any]

MOST_POINTS = 10_000
_RANGE = re.compile(r"(?P<low>[^.]*(?:\.\d[^.]*)?)\.\.(?P<high>[^:]+)(?::(?P<how>.+))?")
_FORM = "values as 16,64,256, a range with steps as 16..256:x2 or 1..9:2, or a range as 1e-4..1e-2:log"
_NOT_SWEPT = {
    "task",
    "name",
    "run_dir",
    "resume",
    "init_from",
    "ray_address",
    "trackers",
    "debug",
    "auto",
    "profile",
    "devices",
    "gpu_mode",
}


@dataclass(frozen=True)
class Values:
    """A list to choose from."""

    values: tuple[Any, ...]

    def draw(self, chance: random.Random) -> Any:
        return chance.choice(self.values)

    def text(self) -> str:
        return ",".join(_written(value) for value in self.values)


@dataclass(frozen=True)
class Range:
    """All numbers between two, drawn evenly or evenly in their logarithm."""

    low: float
    high: float
    log: bool
    integer: bool

    def draw(self, chance: random.Random) -> float | int:
        ends = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        drawn = chance.uniform(*ends)
        kept = min(self.high, max(self.low, math.exp(drawn) if self.log else drawn))
        return round(kept) if self.integer else kept

    def text(self) -> str:
        low, high = (int(end) if self.integer else end for end in (self.low, self.high))
        return f"{low}..{high}" + (":log" if self.log else "")


Domain = Values | Range


@dataclass(frozen=True)
class Space:
    """The domain of each setting, in the order they were given. Where ``given`` holds points, it is these and no others."""

    domains: Mapping[str, Domain]
    given: tuple[Point, ...] = ()

    @property
    def listed(self) -> bool:
        """Whether every setting has a list of values, so that all points can be gone through."""
        return all(isinstance(domain, Values) for domain in self.domains.values())

    @property
    def size(self) -> int:
        """How many points there are; a very large number where there is no end to them."""
        if self.given:
            return len(self.given)
        return math.prod(
            len(domain.values) if isinstance(domain, Values) else 2**62 for domain in self.domains.values()
        )

    def texts(self) -> dict[str, str]:
        """For people."""
        return {name: domain.text() for name, domain in self.domains.items()}

    def to_json(self) -> dict[str, Any]:
        """For the ledger."""
        return {
            n: asdict(d) if isinstance(d, Range) else [_plain(value) for value in d.values]
            for n, d in self.domains.items()
        }

    @classmethod
    def of_json(cls, domains: Mapping[str, Any]) -> Space:
        made: dict[str, Domain] = {}
        for given, domain in domains.items():
            name = _setting(given, "the ledger")
            # a range is checked as its text would be: a ledger may say anything
            written = Range(**domain).text() if isinstance(domain, Mapping) else list(domain)
            made[name] = _domain(name, written, "the ledger")
        return cls(made)

    def grid(self) -> list[Point]:
        """Every combination, the last setting changing fastest; or the points that were given."""
        if self.given:
            return list(self.given)
        ranges = [name for name, domain in self.domains.items() if isinstance(domain, Range)]
        if ranges:
            raise UserError(
                f"a grid needs values, and {_flag(ranges[0])}={self.domains[ranges[0]].text()} is a range; give it steps "
                f"(16..256:x2, 1..9:2), or use --search random or optuna"
            )
        lists = [domain.values for domain in self.domains.values() if isinstance(domain, Values)]
        count = self.size
        if count > MOST_POINTS:
            raise UserError(
                f"the grid has {count:,} points; at most {MOST_POINTS:,} are gone through. Use --search random with --trials N"
            )
        return [dict(zip(self.domains, values, strict=True)) for values in itertools.product(*lists)]

    def draws(self, seed: int) -> Iterator[Point]:
        """Points at random, none twice, until there are none left that are likely to be found."""
        chance, seen, vain = random.Random(seed), set(), 0
        while vain < 1000:
            drawn = (
                {name: domain.draw(chance) for name, domain in self.domains.items()}
                if not self.given
                else None
            )
            point = drawn or chance.choice(self.given)
            key = point_key(point)
            vain = vain + 1 if key in seen else 0
            if key not in seen:
                seen.add(key)
                yield point


def point_key(point: Point) -> str:
    """The same for equal points."""
    return " ".join(f"{name}={_written(value)}" for name, value in sorted(point.items()))


def point_flags(point: Point) -> list[str]:
    """A point as one would give it to ``train``."""
    flags: list[str] = []
    for name, value in point.items():
        if isinstance(value, bool):
            flags.append(_flag(name) if value else f"--no-{name.replace('_', '-')}")
        elif value is not None:
            flags += [_flag(name), _written(value)]
    return flags


def parse_space(entries: Sequence[str]) -> Space:
    """The space of ``NAME=DOMAIN`` entries."""
    pairs: list[tuple[str, str]] = []
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals or not text:
            raise UserError(
                f"--sweep {entry!r}: a setting and its values were needed, as batch-size=16,64; {_FORM}"
            )
        pairs.append((name, text))
    return _space((name, text, f"--sweep {name}={text}") for name, text in pairs)


def read_space(path: Path) -> Space:
    """The space of a YAML file: each setting with a list of values, one value, or a text as for --sweep; or a list of points, each
    a mapping of settings to values."""
    try:
        with path.open(encoding="utf-8") as file:
            content = safe_content(file.read(MOST_CHARACTERS + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the space {path}: {getattr(error, 'strerror', None) or error}; give a YAML file to --space"
        ) from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    if isinstance(content, list) and content and all(isinstance(point, dict) and point for point in content):
        return points_space(content, path.name)
    if not isinstance(content, dict) or not content:
        raise UserError(
            f"{path} holds no space; a mapping of settings was needed, as 'batch_size: [16, 64]' or 'learning_rate: 1e-4..1e-2:log'"
        )
    return _space((str(name), value, f"{path.name}: {name}") for name, value in content.items())


def plain_point(point: Point) -> dict[str, Any]:
    """A point as JSON has it."""
    return {name: _plain(value) for name, value in point.items()}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def points_space(points: Sequence[Mapping[Any, Any]], where: str) -> Space:
    """The space of these points alone."""
    read = [{_setting(str(name), where): value for name, value in point.items()} for point in points]
    made = [
        {name: _value(name, value, f"{where}, point {n}") for name, value in point.items()}
        for n, point in enumerate(read, 1)
    ]
    unique: dict[str, Point] = {}
    for point in made:
        unique.setdefault(point_key(point), point)
    names = dict.fromkeys(name for point in made for name in point)
    domains = {
        name: Values(tuple(dict.fromkeys(point[name] for point in made if name in point))) for name in names
    }
    return Space(domains, tuple(unique.values()))


def _space(entries: Iterable[tuple[str, Any, str]]) -> Space:
    domains: dict[str, Domain] = {}
    for given, value, where in entries:
        name = _setting(given, where)
        if name in domains:
            raise UserError(f"{where}: {name} is given twice; put all its values into one list")
        domains[name] = _domain(name, value, where)
    if not domains:
        raise UserError(f"nothing to sweep: give --sweep NAME=VALUES, or --space FILE; {_FORM}")
    return Space(domains)


def _setting(given: str, where: str) -> str:
    name = given.strip().lstrip("-").replace("-", "_")
    if name in _NOT_SWEPT:
        raise UserError(
            f"{where}: {name} is not swept over, it is the same for all trials; give it as --{name.replace('_', '-')}"
        )
    if name in flat_names():
        return name
    advice = spellings.answer(name, None, flag=False)
    raise UserError(
        f"{where}: unknown setting {name!r}" + (f"; {advice}" if advice else did_you_mean(name, flat_names()))
    )


def _domain(name: str, value: Any, where: str) -> Domain:
    if isinstance(value, str) and ".." in value:
        return _range(name, value, where)
    raw = (
        value
        if isinstance(value, list)
        else [part.strip() for part in value.split(",")]
        if isinstance(value, str)
        else [value]
    )
    values = tuple(dict.fromkeys(_value(name, one, where) for one in raw))
    if not values:
        raise UserError(f"{where}: no values; {_FORM}")
    return Values(values)


def _value(name: str, value: Any, where: str) -> Any:
    empty = isinstance(value, str) and value.lower() in ("none", "null")
    try:
        made = as_declared(name, setting_types()[name], None if empty else value)
        if isinstance(made, int | float) and not isinstance(made, bool):
            Config().but(**{name: made})  # out of range is better told now than by every trial
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if (name, made) == ("batch_size", "auto"):
        raise UserError(f"{where}: auto measures a batch size by itself; give the sizes to be tried")
    return made


def _range(name: str, text: str, where: str) -> Domain:
    """``LOW..HIGH``, evenly; ``:log`` evenly in the logarithm; ``:STEP`` and ``:xFACTOR`` in steps."""
    found = _RANGE.fullmatch(text.strip())
    hint = setting_types()[name]
    kinds = {hint, *get_args(hint)}
    if found is None or not kinds & {int, float}:
        needed = _FORM if kinds & {int, float} else f"a list of values: {name} is no number"
        raise UserError(f"{where}: not understood; give {needed}")
    low, high = (_number(found[end], where) for end in ("low", "high"))
    if not low < high:
        raise UserError(
            f"{where}: the range runs from {found['low']} to {found['high']}; the lower end goes first"
        )
    how, integer = found["how"] or "", float not in kinds
    if how in ("", "log"):
        if how == "log" and low <= 0:
            raise UserError(f"{where}: a logarithmic range begins above 0, not at {found['low']}")
        ends = Range(low, high, how == "log", integer)
        for end in (low, high):
            _value(name, round(end) if integer else end, where)
        return ends
    return Values(
        tuple(
            dict.fromkeys(
                _value(name, round(n) if integer else n, where) for n in _stepped(low, high, how, where)
            )
        )
    )


def _stepped(low: float, high: float, how: str, where: str) -> list[float]:
    factor = how.startswith("x")
    step = _number(how.removeprefix("x"), where)
    if (factor and (step <= 1 or low <= 0)) or step <= 0:
        raise UserError(
            f"{where}: steps of {how} lead nowhere; a step above 0, or a factor above 1 from a positive beginning, was needed"
        )
    count = math.floor((math.log(high / low) / math.log(step) if factor else (high - low) / step) + 1e-9)
    if count > MOST_POINTS:
        raise UserError(f"{where}: {count:,} steps; at most {MOST_POINTS:,} make sense")
    return [low * step**index if factor else low + step * index for index in range(count + 1)]


def _number(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: {text!r} is no number; {_FORM}")
    return number


def _written(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(str(inner) for inner in value)
    return (
        {None: "none", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
