"""A bounded number of a run's events of one kind: for plots, and for figures that need no more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from orchestrator.record.events.kinds import Evaluation, Event, Exchange, Monitor, Phases, decode_event

Entry = tuple[int, Event]
"""An event, and its number in the record."""
Measure = Callable[[Event], float | None]
"""Returns a figure of an event. The event with the largest figure of a group is kept."""
Reduce = Callable[[Sequence[Entry]], list[Entry]]
"""Returns the few entries that stand for a group of neighbours, in order."""

NUM_RECENT = 64
"""The newest events, which are all kept."""
MAX_GROUPS = 1024
_MAX_OPEN = 64


class ThinnedEvents:
    """All events of a short run. Of a long one the newest, and a few of each group of earlier ones.

    Groups are equally long. When there are too many, neighbours are joined. So the kept events depend on the
    events alone, in one pass over them."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._groups: list[list[Entry]] = []
        self._length = 1
        """Events of each group."""
        self._open: list[Entry] = []
        """The group that is not complete."""
        self._num_open = 0
        self._recent: deque[Entry] = deque()

    def add(self, entry: Entry) -> None:
        self._recent.append(entry)
        if len(self._recent) <= NUM_RECENT:
            return
        self._open.append(self._recent.popleft())
        self._num_open += 1
        if self._num_open == self._length:
            self._groups.append(self._reduce(self._open))
            self._open = []
            self._num_open = 0
        elif len(self._open) > _MAX_OPEN:
            self._open = self._reduce(self._open)
        if len(self._groups) == MAX_GROUPS:
            pairs = zip(self._groups[::2], self._groups[1::2], strict=True)
            self._groups = [self._reduce([*first, *second]) for first, second in pairs]
            self._length *= 2

    def entries(self) -> list[Entry]:
        """Return the kept events in order."""
        return [*(entry for group in self._groups for entry in group), *self._open, *self._recent]

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": self._groups,
            "length": self._length,
            "open": self._open,
            "num_open": self._num_open,
            "recent": list(self._recent),
        }

    def load(self, content: Mapping[str, Any]) -> None:
        """Continue from what ``to_json`` returned."""
        self._groups = [list(map(entry_of, group)) for group in content["groups"]]
        self._length = int(content["length"])
        self._open = list(map(entry_of, content["open"]))
        self._num_open = int(content["num_open"])
        self._recent = deque(map(entry_of, content["recent"]))


def entry_of(content: Sequence[Any]) -> Entry:
    """Return an entry that was read from JSON."""
    number, fields = content
    event = decode_event(fields)
    if event is None:
        raise ValueError(f"{fields!r} is not an event")
    return int(number), event


def last_only(entries: Sequence[Entry]) -> list[Entry]:
    return [entries[-1]]


def extremes(*measures: Measure) -> Reduce:
    """Return a rule that keeps the event with the largest figure of each measure, and the last one."""

    def reduce(entries: Sequence[Entry]) -> list[Entry]:
        if len(entries) <= len(measures) + 1:
            return list(entries)
        kept = {entries[-1][0]: entries[-1]}
        for measure in measures:
            known = [(value, entry) for entry in entries if (value := measure(entry[1])) is not None]
            if known:
                largest = max(known, key=lambda pair: pair[0])[1]
                kept[largest[0]] = largest
        return [kept[number] for number in sorted(kept)]

    return reduce


def weighted_mean(entries: Sequence[Entry]) -> list[Entry]:
    """Return one event with the means per step of all, and one of those of the warm-up."""
    known = [(number, event) for number, event in entries if isinstance(event, Phases | Exchange)]
    parts = [[entry for entry in known if entry[1].warm_up is warm_up] for warm_up in (True, False)]
    return sorted((_joined(part) for part in parts if part), key=lambda entry: entry[0])


def _joined(entries: Sequence[tuple[int, Phases | Exchange]]) -> Entry:
    number, last = entries[-1]
    if len(entries) == 1:
        return number, last
    weights = [event.steps or 1.0 for _, event in entries]
    means: dict[str, Any] = {"steps": sum(weights)}
    for name in vars(last).keys() - {"step", "steps", "time", "warm_up"}:
        values = [getattr(event, name) for _, event in entries]
        if None not in values:
            products = (value * weight for value, weight in zip(values, weights, strict=True))
            means[name] = sum(products) / sum(weights)
    return number, replace(last, **means)


def largest(name: str) -> Measure:
    """Return a measure that is largest for the largest value of a field, or for one that is not a number."""
    read = attrgetter(name)

    def measure(event: Event) -> float | None:
        value = read(event)
        return math.inf if value is not None and math.isnan(value) else value

    return measure


def smallest_loss(event: Event) -> float | None:
    """Return a measure that is largest for the smallest loss."""
    loss = getattr(event, "loss", None)
    return None if loss is None or math.isnan(loss) else -loss


def newest_best(event: Event) -> float | None:
    """Return a measure that is largest for the newest evaluation that was the best so far."""
    return event.step if isinstance(event, Evaluation) and event.best else None


def process_memory(event: Event) -> float | None:
    """Return the memory of the process in a reading of the monitor."""
    return event.host.process_memory if isinstance(event, Monitor) else None
