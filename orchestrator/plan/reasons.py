"""Reasons that several choices of the plan share."""

from __future__ import annotations

from orchestrator.config.checks import Switch
from orchestrator.types import Choice

NO_AUTO = "--no-auto uses the plain default"


def set_switch(value: Switch, flag: str) -> Choice[bool] | None:
    """Return the choice of a switch that the user set; None if it was left to the plan."""
    return None if value == "auto" else Choice(value == "on", f"set by {flag} {value}")
