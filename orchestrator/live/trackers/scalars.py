"""The numbers of an event, under the names that trackers show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event by the names that trackers show; empty for events without numbers."""
    match event:
        case kinds.Step():
            return _prefixed("train/", _step_values(event))
        case kinds.Evaluation():
            return _prefixed("validation/", {"loss": event.loss} | dict(event.metrics))
        case kinds.Phases():
            return _prefixed("phases/", _fields(event, "steps"))
        case kinds.Exchange():
            values = {f"{name}_per_step": getattr(event, name) for name in ("bytes", "seconds", "rows")}
            return _prefixed("exchange/", values)
        case kinds.Epoch():
            return _prefixed("epoch/", _fields(event, "epoch") | _memory_values(event))
        case kinds.Recovery():
            return _prefixed("recovery/", _fields(event, "attempt"))
        case kinds.Monitor():
            return _prefixed("monitor/", _monitor_values(event))
        case kinds.Load():
            values = {f"layer{index}_imbalance": _imbalance(layer) for index, layer in enumerate(event.loads)}
            return _prefixed("experts/", values)
        case kinds.Logged():
            return _prefixed("callbacks/", event.values)
        case kinds.ExpertChange():
            return _prefixed("experts/", {f"layer{event.layer}_number": event.experts})
        case _:
            return {}


def _step_values(step: kinds.Step) -> dict[str, float | None]:
    rate = step.samples / step.seconds if step.samples and step.seconds else None
    fields = {"loss": step.loss, "grad_norm": step.grad_norm, "learning_rate": step.lr}
    return fields | dict(step.metrics) | {"samples_per_second": rate}


def _memory_values(epoch: kinds.Epoch) -> dict[str, float | None]:
    memory = epoch.memory
    if memory is None:
        return {}
    sizes = {"allocated": memory.allocated, "reserved": memory.reserved} | dict(memory.parts)
    return {f"memory_{name}": value for name, value in sizes.items()}


def _monitor_values(reading: kinds.Monitor) -> dict[str, Any]:
    values = {f"host_{name}": value for name, value in vars(reading.host).items()}
    for device in reading.devices:
        figures = {f"gpu{device.index}_{name}": value for name, value in vars(device).items()}
        values |= {name: value for name, value in figures.items() if not name.endswith(("_index", "_name"))}
    return values


def _imbalance(counts: Iterable[float | None]) -> float | None:
    """Return the tokens of the busiest expert over the mean: 1 is balanced, None without tokens."""
    known = [count or 0.0 for count in counts]
    return max(known) * len(known) / sum(known) if sum(known) else None


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {prefix + name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, bool)}


def _fields(event: Event, *excluded: str) -> dict[str, Any]:
    return {name: value for name, value in vars(event).items() if name not in ("time", "step", *excluded)}
