"""The point of a space that is nearest to the plan's choices: the beginning of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.config.sections.checks import Switch
from orchestrator.config.settings import Config, flat_names, setting_types
from orchestrator.config.sweep.space import Domain, Point, Space, Values
from orchestrator.plan.planning import Plan


def planned_point(space: Space, config: Config, plan: Plan) -> Point:
    """Return the point nearest to the given settings and the plan's choices."""
    choices = _planned_values(config, plan)
    for name in space.domains:
        if setting_types()[name] == Switch:
            choices[name] = "on" if choices.get(name) else "off"
    return {name: _nearest(domain, choices.get(name)) for name, domain in space.domains.items()}


def _planned_values(config: Config, plan: Plan) -> dict[str, Any]:
    values = {
        name: getattr(getattr(config, section), name) for name, section in flat_names().items() if section
    }
    values |= {name: choice.value for name, choice in plan.choices().items()}
    return values | {"parallel_strategy": plan.strategy.value}


def _nearest(domain: Domain, value: Any) -> Any:
    """Return the value of a domain that is nearest to the given one, or its first value."""
    if isinstance(domain, Values):
        return _nearest_of_list(domain.values, value)
    number = domain.low
    if isinstance(value, int | float):
        number = min(domain.high, max(domain.low, float(value)))
    return round(number) if domain.integer else number


def _nearest_of_list(values: Sequence[Any], value: Any) -> Any:
    if value in values:
        return value
    numbers = [entry for entry in values if _is_number(entry)]
    if not _is_number(value) or not numbers:
        return values[0]
    return min(numbers, key=lambda number: abs(number - value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
