"""Words that several parts of the plan share."""

from __future__ import annotations

from orchestrator.config.sections.checks import Switch
from orchestrator.plan.estimate import ModelFacts
from orchestrator.types import Choice, count_text

NO_AUTO = "--no-auto uses the plain default"


def set_switch(value: Switch, flag: str) -> Choice[bool] | None:
    """Return the choice of a switch that the user set; None if it was left to the plan."""
    return None if value == "auto" else Choice(value == "on", f"set by {flag} {value}")


def trained_text(facts: ModelFacts) -> str | None:
    """Return the trained parameters among all, for people; None if all are trained."""
    if facts.trainable == facts.parameters:
        return None
    share = facts.trainable / facts.parameters
    return f"{facts.trainable:,} of {count_text(facts.parameters)} ({100 * share:.3g}%)"


def adapters_text(facts: ModelFacts) -> str | None:
    """Return how many layers of which kind have adapters, and which have none; None without adapters."""
    if not facts.adapters:
        return None
    with_adapters = [f"{adapted} {name}" for name, adapted, _ in facts.adapters if adapted]
    without = [f"{total - adapted} {name}" for name, adapted, total in facts.adapters if adapted < total]
    return f"on {', '.join(with_adapters)}; none on {', '.join([*without, 'routers'])}"
