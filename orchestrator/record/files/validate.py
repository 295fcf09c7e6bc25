"""Check of the event fields that the summary calculates with: a file may be damaged or forged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from orchestrator.record.files.events import Event

Check = Callable[[Any], bool]

_MAX_INTEGER = 2**53  # a float counts exactly up to here
_MAX_NUMBER = 1e300  # sums of larger numbers overflow


def is_valid(event: Event) -> bool:
    """Return whether every field that the summary calculates with is present and of its type."""
    required = _REQUIRED.get(event["event"], {})
    optional = _OPTIONAL.get(event["event"], {})
    has_required = all(name in event and check(event[name]) for name, check in required.items())
    return has_required and all(
        check(event[name]) for name, check in optional.items() if event.get(name) is not None
    )


def is_step(value: Any) -> bool:
    """Return whether a value is an integer that a step, or another count, can have."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number that sums can have."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < _MAX_NUMBER and math.isfinite(value)


def _is_loss(value: Any) -> bool:
    # A diverged run has losses that JSON carries as text only.
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, float) or is_finite_number(value)


def _is_memory(value: Any) -> bool:
    return isinstance(value, dict) and is_finite_number(value.get("allocated"))


def _is_present(value: Any) -> bool:  # noqa: ARG001
    return True


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


_STEP: Mapping[str, Check] = {"step": is_step}
_REQUIRED: Mapping[str, Mapping[str, Check]] = {
    "bad_samples": {"step": is_step, "count": is_step},
    "step": {
        "step": is_step,
        "seconds": is_finite_number,
        "samples": is_finite_number,
        "units": is_finite_number,
        "loss": _is_loss,
    },
    "evaluate": {"step": is_step, "loss": _is_loss, "metrics": _is_mapping},
    "epoch": {"step": is_step, "epoch": is_step},
    "end": {"status": _is_present, "reason": _is_present},
    "upload": _STEP,
    "final": {"step": is_step, "weights": _is_present},
    "phases": _STEP,
    "exchange": _STEP,
    "load": _STEP,
    "expert": _STEP,
    "expert_graph": _STEP,
    "monitor": _STEP,
    "log": _STEP,
}
_OPTIONAL: Mapping[str, Mapping[str, Check]] = {
    "epoch": {"memory": _is_memory},
    "end": {"memory": _is_memory, "seconds": is_finite_number},
    "start": {"step": is_step, "workers": is_step},
    "recovery": {
        "step": is_step,
        "workers": is_step,
        "expert_replicas": is_step,
        "expert_replicas_before": is_step,
        "lost_steps": is_finite_number,
        "total_seconds": is_finite_number,
    },
}
