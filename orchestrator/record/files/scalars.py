"""The numbers of an event, under the names that trackers show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.record.files.events import Event


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event by the names that trackers show; empty for events without numbers."""
    match event["event"]:
        case "step":
            return _prefixed("train/", _step_values(event))
        case "evaluate":
            return _prefixed("validation/", {"loss": event.get("loss")} | _mapping(event.get("metrics")))
        case "phases":
            return _prefixed("phases/", _fields(event, "steps") | _mapping(event.get("seconds")))
        case "exchange":
            names = ("bytes", "seconds", "rows")
            return _prefixed("exchange/", {f"{name}_per_step": event.get(name) for name in names})
        case "epoch":
            measured = _mapping(event.get("memory"))
            peaks = {name: measured.get(name) for name in ("allocated", "reserved")}
            sizes = peaks | _mapping(measured.get("parts"))
            memory = {f"memory_{name}": value for name, value in sizes.items()}
            return _prefixed("epoch/", _fields(event, "epoch") | memory)
        case "recovery":
            return _prefixed("recovery/", _fields(event, "attempt"))
        case "monitor":
            return _prefixed("monitor/", _monitor_values(event))
        case "load":
            layers = enumerate(event.get("loads") or ())
            return _prefixed(
                "experts/", {f"layer{layer}_imbalance": _imbalance(loads) for layer, loads in layers}
            )
        case "log":
            return _prefixed("callbacks/", _mapping(event.get("values")))
        case "expert":
            return _prefixed("experts/", {f"layer{event.get('layer')}_number": event.get("experts")})
        case _:
            return {}


def _step_values(event: Event) -> dict[str, Any]:
    fields = {
        "loss": event.get("loss"),
        "grad_norm": event.get("grad_norm"),
        "learning_rate": event.get("lr"),
    }
    return fields | _mapping(event.get("metrics")) | {"samples_per_second": _samples_per_second(event)}


def _monitor_values(event: Event) -> dict[str, Any]:
    values = {f"host_{name}": value for name, value in _mapping(event.get("host")).items()}
    for device in event.get("devices") or ():
        values |= {
            f"gpu{device.get('index')}_{name}": value
            for name, value in device.items()
            if name not in ("index", "name")
        }
    return values


def _imbalance(loads: Iterable[Any]) -> float | None:
    """Return the tokens of the busiest expert over the mean: 1 is balanced, None without tokens."""
    counts = [to_float(count) or 0.0 for count in loads]
    return max(counts) * len(counts) / sum(counts) if sum(counts) else None


def _samples_per_second(event: Event) -> float | None:
    samples = to_float(event.get("samples"))
    seconds = to_float(event.get("seconds"))
    return samples / seconds if samples and seconds else None


def to_float(value: Any) -> float | None:
    """Return the number in a field of an event, also from the texts 'nan' and 'inf'; None for
    other values."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {
        prefix + str(name): number
        for name, value in values.items()
        if (number := to_float(value)) is not None
    }


def _fields(event: Event, *excluded: str) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "time", "step", *excluded)}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
