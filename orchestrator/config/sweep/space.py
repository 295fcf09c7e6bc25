"""A search space over settings, and its points: one value for each setting."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError
from orchestrator.types import flag_of

Point = Mapping[str, Any]

MAX_POINTS = 10_000
_MAX_REPEATED_DRAWS = 1000
_UNBOUNDED = 2**62


@dataclass(frozen=True)
class Values:
    """A list of values to choose from."""

    values: tuple[Any, ...]

    def draw(self, generator: random.Random) -> Any:
        return generator.choice(self.values)

    def text(self) -> str:
        return ",".join(_value_text(value) for value in self.values)


@dataclass(frozen=True)
class Range:
    """The numbers between two ends, drawn uniformly or log-uniformly."""

    low: float
    high: float
    log: bool
    integer: bool

    def draw(self, generator: random.Random) -> float | int:
        if self.log:
            number = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            number = generator.uniform(self.low, self.high)
        # The exponential of a logarithm may lie just outside.
        number = min(self.high, max(self.low, number))
        return round(number) if self.integer else number

    def text(self) -> str:
        low, high = (int(end) if self.integer else end for end in (self.low, self.high))
        return f"{low}..{high}" + (":log" if self.log else "")


Domain = Values | Range


@dataclass(frozen=True)
class Space:
    """The domain of each setting, in the order given; or, with ``given``, these points only."""

    domains: Mapping[str, Domain]
    given: tuple[Point, ...] = ()

    @property
    def listed(self) -> bool:
        """Whether every setting has a list of values, so that all points can be enumerated."""
        return all(isinstance(domain, Values) for domain in self.domains.values())

    @property
    def size(self) -> int:
        """The number of points; a very large number if a setting has a range."""
        if self.given:
            return len(self.given)
        sizes = [
            len(domain.values) if isinstance(domain, Values) else _UNBOUNDED
            for domain in self.domains.values()
        ]
        return math.prod(sizes)

    def varied(self) -> list[str]:
        """Return the settings that have more than one value."""
        points = {name: {repr(point.get(name)) for point in self.given} for name in self.domains}
        return [
            name
            for name, domain in self.domains.items()
            if (
                len(points[name]) > 1
                if self.given
                else not isinstance(domain, Values) or len(domain.values) > 1
            )
        ]

    def texts(self) -> dict[str, str]:
        """Return the domain of each setting as people write it."""
        return {name: domain.text() for name, domain in self.domains.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the domains as JSON values, for the ledger.

        ``space_parser.space_from_json`` reads them back.
        """
        return {
            name: asdict(domain)
            if isinstance(domain, Range)
            else [_to_json(value) for value in domain.values]
            for name, domain in self.domains.items()
        }

    def grid(self) -> list[Point]:
        """Return every combination, the last setting changing fastest; or the points that were given."""
        if self.given:
            return list(self.given)
        for name, domain in self.domains.items():
            if isinstance(domain, Range):
                raise UserError(
                    f"a grid needs values, and {flag_of(name)}={domain.text()} is a range; give it steps "
                    f"(16..256:x2, 1..9:2), or use --search random or optuna"
                )
        if self.size > MAX_POINTS:
            raise UserError(
                f"the grid has {self.size:,} points; the limit is {MAX_POINTS:,}. "
                "Use --search random with --trials N"
            )
        lists = [domain.values for domain in self.domains.values() if isinstance(domain, Values)]
        return [dict(zip(self.domains, values, strict=True)) for values in itertools.product(*lists)]

    def draws(self, seed: int) -> Iterator[Point]:
        """Yield random points, none twice, until new ones are unlikely to be found."""
        generator = random.Random(seed)
        seen: set[str] = set()
        repeated = 0
        while repeated < _MAX_REPEATED_DRAWS:
            point = self._draw(generator)
            key = point_key(point)
            if key in seen:
                repeated += 1
                continue
            repeated = 0
            seen.add(key)
            yield point

    def _draw(self, generator: random.Random) -> Point:
        if self.given:
            return generator.choice(self.given)
        return {name: domain.draw(generator) for name, domain in self.domains.items()}


def point_key(point: Point) -> str:
    """Return a text that is the same for equal points."""
    return " ".join(f"{name}={_value_text(value)}" for name, value in sorted(point.items()))


def point_flags(point: Point) -> list[str]:
    """Return a point as flags of ``train``."""
    flags: list[str] = []
    for name, value in point.items():
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no_{name}"))
        elif value is not None:
            flags += [flag_of(name), _value_text(value)]
    return flags


def plain_point(point: Point) -> dict[str, Any]:
    """Return a point as JSON values."""
    return {name: _to_json(value) for name, value in point.items()}


def is_number(value: Any) -> bool:
    """Whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_json(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _value_text(value: Any) -> str:
    """Return a value as ``--sweep`` takes it; ledgers and keys of points hold this form."""
    if isinstance(value, tuple | list):
        return ",".join(str(entry) for entry in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
