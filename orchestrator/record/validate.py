"""Whether an event is one that a run wrote: the summary counts with its figures. A record may be damaged, or made up by someone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.record.events import Event

Check = Callable[[Any], bool]

_MOST = 2**53  # that a float can count


def is_valid(event: Event) -> bool:
    """Whether every field that the summary counts with is there, and of its kind."""
    needed, may = _NEEDED.get(event["event"], {}), _MAY.get(event["event"], {})
    return all(name in event and check(event[name]) for name, check in needed.items()) and all(
        check(event[name]) for name, check in may.items() if event.get(name) is not None
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST


def _figure(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300
        and math.isfinite(value)
    )


def _loss(value: Any) -> bool:
    return value in ("nan", "inf", "-inf") if isinstance(value, str) else _number(value)


def _number(value: Any) -> bool:
    return isinstance(value, float) or _figure(value)


def _memory(value: Any) -> bool:
    return isinstance(value, dict) and _figure(value.get("allocated"))


def _there(value: Any) -> bool:  # noqa: ARG001
    return True


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


_STEP: Mapping[str, Check] = {"step": _whole}
_NEEDED: Mapping[str, Mapping[str, Check]] = {
    "step": {**_STEP, "seconds": _figure, "samples": _figure, "units": _figure, "loss": _loss},
    "evaluate": {**_STEP, "loss": _loss, "metrics": _mapping},
    "epoch": {**_STEP, "epoch": _whole},
    "end": {"status": _there, "reason": _there},
    **dict.fromkeys(("phases", "exchange", "load", "monitor"), _STEP),
}
_MAY: Mapping[str, Mapping[str, Check]] = {
    "epoch": {"memory": _memory},
    "end": {"memory": _memory, "seconds": _figure},
    "start": {**_STEP, "workers": _whole},
    "recovery": {**_STEP, "workers": _whole, "lost_steps": _figure, "total_seconds": _figure},
}
