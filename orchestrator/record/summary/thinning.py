"""A bounded number of a run's events of one kind: for plots, and for figures that need no more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any

from orchestrator.record.events.kinds import Evaluation, Event, Exchange, Monitor, Phases, decode_event


def _entry(content: Any) -> tuple[int, Event]:
    """Return an entry that was read from JSON."""
    number, fields = content
    event = decode_event(fields)
    if event is None:
        raise ValueError(f"{fields!r} is not an event")
    return int(number), event


Entry = Annotated[tuple[int, Event], _entry]
"""An event, and its number in the record."""
Measure = Callable[[Event], float | None]
"""Returns a figure of an event. The event with the largest figure of a group is kept."""
Reduce = Callable[[Sequence[Entry]], list[Entry]]
"""Returns the few entries that stand for a group of neighbours, in order."""

NUM_RECENT = 64
"""The newest events, which are all kept."""
MAX_GROUPS = 1024
_MAX_OPEN = 64


@dataclass
class ThinnedEvents:
    """All events of a short run. Of a long one the newest, and a few of each group of earlier ones.

    Groups are equally long. When there are too many, neighbours are joined. So the kept events depend on the
    events alone, in one pass over them."""

    groups: list[list[Entry]] = field(default_factory=list)
    length: int = 1
    """Events of each group."""
    open: list[Entry] = field(default_factory=list)
    """The group that is not complete."""
    num_open: int = 0
    recent: deque[Entry] = field(default_factory=deque)

    def add(self, entry: Entry, reduce: Reduce) -> None:
        self.recent.append(entry)
        if len(self.recent) <= NUM_RECENT:
            return
        self.open.append(self.recent.popleft())
        self.num_open += 1
        if self.num_open == self.length:
            self.groups.append(reduce(self.open))
            self.open = []
            self.num_open = 0
        elif len(self.open) > _MAX_OPEN:
            self.open = reduce(self.open)
        if len(self.groups) == MAX_GROUPS:
            pairs = zip(self.groups[::2], self.groups[1::2], strict=True)
            self.groups = [reduce([*first, *second]) for first, second in pairs]
            self.length *= 2

    def cut(self, step: int, newest: int) -> None:
        """Drop the events past a step, which are repeated, except the event with the number ``newest``."""

        def kept(entries: Iterable[Entry]) -> list[Entry]:
            return [entry for entry in entries if (entry[1].step or 0) <= step or entry[0] == newest]

        self.groups = [group for group in map(kept, self.groups) if group]
        self.open = kept(self.open)
        self.recent = deque(kept(self.recent))

    def sample(self) -> list[Entry]:
        """Return the last event of each group, and all newer ones."""
        return [*(group[-1] for group in self.groups), *self.open, *self.recent]

    def entries(self) -> list[Entry]:
        """Return the kept events in order."""
        return [*(entry for group in self.groups for entry in group), *self.open, *self.recent]


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
