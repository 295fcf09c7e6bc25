"""The numbers of an event, under the names that trackers show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.record.events import Event


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event under the names that trackers show; empty for events without any."""
    match event["event"]:
        case "step":
            named = {
                "loss": event.get("loss"),
                "grad_norm": event.get("grad_norm"),
                "learning_rate": event.get("lr"),
            }
            return _numbers(
                "train/", named | _mapping(event.get("metrics")) | {"samples_per_second": _rate(event)}
            )
        case "evaluate":
            return _numbers("validation/", {"loss": event.get("loss")} | _mapping(event.get("metrics")))
        case "phases":
            return _numbers("phases/", _without(event, "steps") | _mapping(event.get("seconds")))
        case "exchange":
            return _numbers(
                "exchange/", {f"{name}_per_step": event.get(name) for name in ("bytes", "seconds", "rows")}
            )
        case "epoch":
            memory = {f"memory_{name}": value for name, value in _mapping(event.get("memory")).items()}
            return _numbers("epoch/", _without(event, "epoch") | memory)
        case "recovery":
            return _numbers("recovery/", _without(event, "attempt"))
        case "monitor":
            return _numbers("monitor/", _monitor_values(event))
        case "load":
            return _numbers(
                "experts/",
                {
                    f"layer{layer}_imbalance": _imbalance(loads)
                    for layer, loads in enumerate(event.get("loads") or ())
                },
            )
        case _:
            return {}


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
    """Tokens of the busiest expert over the mean: 1 is even; None where no token came."""
    counts = [to_float(count) or 0.0 for count in loads]
    return max(counts) * len(counts) / sum(counts) if sum(counts) else None


def _rate(event: Event) -> float | None:
    samples, seconds = to_float(event.get("samples")), to_float(event.get("seconds"))
    return samples / seconds if samples and seconds else None


def to_float(value: Any) -> float | None:
    """The number that a field of an event holds, also as the text 'nan' or 'inf'; None where it holds something else."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _numbers(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {
        prefix + str(name): found for name, value in values.items() if (found := to_float(value)) is not None
    }


def _without(event: Event, *names: str) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "time", "step", *names)}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
