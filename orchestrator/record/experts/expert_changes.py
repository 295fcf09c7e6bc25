"""Changes of the experts during a run, as ``expert`` events record them.

The events may have any shape: one that names no known change, layer or expert is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.record.files.effective import effective_events
from orchestrator.record.files.events import Event
from orchestrator.record.files.scalars import to_float

KINDS = ("born", "warmed", "merged", "pruned", "moved", "copied", "undone")
_MAX_ID = 2**31
_NEW_PROCESSES = ("start", "failure")
"""Events after which the workers may repeat the changes of a step."""


@dataclass(frozen=True)
class ExpertChange:
    """One change of a layer's experts. Losses and the output's change are None where nobody measured them."""

    step: int
    kind: str
    layer: int
    layer_name: str
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    """The ranks of the hosts of each expert's copies after the change."""
    splits: tuple[tuple[int, ...], ...]
    """The shares of each expert's tokens that its copies get, as whole numbers; empty if they are equal."""
    reason: str
    loss_before: float | None
    loss_after: float | None
    output_change: float | None
    seconds: float | None
    num_experts: int | None
    """The number of experts of the layer after the change."""

    def is_undone_by(self, other: ExpertChange) -> bool:
        changed = (self.layer, self.ids, self.parents)
        return other.kind == "undone" and changed == (other.layer, other.ids, other.parents)


def parse_change(event: Event) -> ExpertChange | None:
    """Return the change of an ``expert`` event; None if it says not what changed."""
    step = as_id(event.get("step"))
    layer = as_id(event.get("layer"))
    ids = as_ids(event.get("ids"))
    kind = event.get("change")
    if step is None or layer is None or not ids or kind not in KINDS:
        return None
    return ExpertChange(
        step=step,
        kind=kind,
        layer=layer,
        layer_name=str(event.get("layer_name") or ""),
        ids=ids,
        parents=as_ids(event.get("parents")),
        hosts=_nested_ids(event.get("hosts")),
        splits=_nested_ids(event.get("splits")),
        reason=str(event.get("reason") or ""),
        loss_before=to_float(event.get("loss_before")),
        loss_after=to_float(event.get("loss_after")),
        output_change=to_float(event.get("output_change")),
        seconds=to_float(event.get("seconds")),
        num_experts=as_id(event.get("experts")),
    )


def expert_changes(events: Iterable[Event]) -> list[ExpertChange]:
    """Return the changes that count, in order."""
    parsed = [parse_change(event) for event in expert_events(events)]
    return [change for change in parsed if change is not None]


def expert_events(events: Iterable[Event]) -> list[Event]:
    """Return the ``expert`` events without those that a restart discarded or repeated.

    A restart at step N restores a state from before or after the changes of step N. If the new processes
    carry out changes at that step, these replace the ones before the restart."""
    kinds = ("expert", "recovery", *_NEW_PROCESSES)
    relevant = [event for event in events if event["event"] in kinds and _has_step(event)]
    events_of_step: dict[int, list[Event]] = {}
    attempt_of_step: dict[int, int] = {}
    attempt = 0
    for event in effective_events(relevant):
        attempt += event["event"] in _NEW_PROCESSES
        if event["event"] != "expert":
            continue
        step = event["step"]
        if attempt_of_step.get(step) != attempt:
            events_of_step[step] = []
            attempt_of_step[step] = attempt
        events_of_step[step].append(event)
    return [event for step in sorted(events_of_step) for event in events_of_step[step]]


def lasting_changes(changes: Sequence[ExpertChange]) -> list[ExpertChange]:
    """Return the changes that were not undone, without the events that undo."""
    lasting: list[ExpertChange] = []
    for change in changes:
        if change.kind != "undone":
            lasting.append(change)
        elif lasting and lasting[-1].is_undone_by(change):
            lasting.pop()
    return lasting


def change_counts(changes: Sequence[ExpertChange]) -> dict[str, int]:
    """Return the number of lasting changes by kind, and the number of undone ones."""
    counts = Counter(change.kind for change in lasting_changes(changes))
    counts["undone"] = sum(change.kind == "undone" for change in changes)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def final_num_experts(
    changes: Sequence[ExpertChange], loads: Sequence[Event], final_step: int | None = None
) -> list[int]:
    """Return the number of experts of each layer after a step, else at the end.

    They follow from the last loads until then and from later changes."""
    if final_step is not None:
        changes = [change for change in changes if change.step <= final_step]
        loads = [load for load in loads if load["step"] <= final_step]
    last_load = loads[-1] if loads else {}
    layers = last_load.get("loads")
    numbers = [len(layer) if isinstance(layer, list) else 0 for layer in layers] if layers else []
    for change in changes:
        is_later = change.step >= last_load.get("step", 0)
        if is_later and change.num_experts is not None and change.layer < len(numbers):
            numbers[change.layer] = change.num_experts
    return numbers


def as_id(value: Any) -> int | None:
    """Return a count, an index or an id of the record; None for any other value."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and 0 <= value < _MAX_ID else None


def as_ids(value: Any) -> tuple[int, ...]:
    """Return the ids in a list of the record; empty unless all of them are ids."""
    ids = [as_id(item) for item in value] if isinstance(value, list) else []
    known = tuple(item for item in ids if item is not None)
    return known if len(known) == len(ids) else ()


def _nested_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(as_ids(item) for item in value) if isinstance(value, list) else ()


def _has_step(event: Mapping[str, Any]) -> bool:
    return event["event"] != "expert" or as_id(event.get("step")) is not None
