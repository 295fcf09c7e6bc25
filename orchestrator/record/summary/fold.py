"""The fold of a run's events: a bounded number of events, and the sums over all of them.

Summary, report and ``watch`` show the fold, so that neither their time nor their memory grows with the run.
It is made event by event and can be saved and continued (see ``index``)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from orchestrator.record.events import kinds
from orchestrator.record.events.effective import Rollbacks, limits_of
from orchestrator.record.events.kinds import Event, StepEvent
from orchestrator.record.files.reading import Extent
from orchestrator.record.summary.thinning import (
    Entry,
    Reduce,
    ThinnedEvents,
    extremes,
    largest,
    last_only,
    newest_best,
    process_memory,
    smallest_loss,
    weighted_mean,
)
from orchestrator.record.summary.totals import Totals

E = TypeVar("E", bound=Event)

_FREQUENT = (StepEvent, kinds.Checkpoint, kinds.Upload, kinds.Warned, kinds.Notice, kinds.SnapshotInterval)
"""Kinds of which a part is kept. All events of the others are, those too that a restart has discarded."""
_RULES: Mapping[str, Reduce] = {
    kinds.Step.EVENT: extremes(smallest_loss, largest("loss"), largest("grad_norm"), largest("seconds")),
    kinds.Evaluation.EVENT: extremes(smallest_loss, largest("loss"), newest_best),
    kinds.Monitor.EVENT: extremes(process_memory),
    kinds.Phases.EVENT: weighted_mean,
    kinds.Exchange.EVENT: weighted_mean,
    # They are rare, and the hosts of the experts now follow from all of them.
    kinds.ExpertChange.EVENT: list,
}


@dataclass
class _Span:
    """Neighbouring events of kinds that are thinned."""

    first: int
    last: int
    begin: float
    end: float
    num_steps: int = 0

    def entries(self) -> list[Entry]:
        first = kinds.LeftOut(time=self.begin, num_steps=self.num_steps)
        return [(self.first, first), (self.last, kinds.LeftOut(time=self.end))]


@dataclass
class RunFold:
    """The events of a run up to an extent of its record."""

    extent: Extent = field(default_factory=Extent)
    totals: Totals = field(default_factory=Totals)
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    max_step: int | None = None
    """The largest step of the thinned events. A restart at an earlier step needs an earlier fold."""
    num_events: int = 0
    whole: list[Entry] = field(default_factory=list)
    thinned: dict[str, ThinnedEvents] = field(default_factory=dict)
    span: _Span | None = None

    def add(self, event: Event, limit: float = math.inf) -> int | None:
        """Take the next event. ``limit`` is the lowest step that training continues from after it.

        Returns the step that training continues from if the event itself discards others."""
        self.num_events += 1
        counts = not isinstance(event, StepEvent) or event.step <= limit
        self.totals.add(event, counts)
        if isinstance(event, _FREQUENT):
            if not isinstance(event, kinds.Warned):
                self._extend_span(event)
            if counts:
                self._thin(event)
        else:
            self._close_span()
            self.whole.append((self.num_events, event))
        return self.rollbacks.add(event)

    def follow(self, event: Event) -> None:
        """Take the next event of a run that goes on: nobody knows what a later restart discards.

        When one does, the kept events past it go. The totals have counted them already, so only those of
        all recorded events are right."""
        step = self.add(event)
        if step is not None:
            for kind, thinned in self.thinned.items():
                if issubclass(kinds.KINDS[kind], StepEvent):
                    thinned.cut(step, self.num_events)

    def events(self) -> list[Event]:
        """Return the kept events in order. Of a short run they are all that count."""
        return [event for _, event in self.entries()]

    def entries(self, classes: tuple[type[Event], ...] = (Event,)) -> list[Entry]:
        """Return the kept events of these classes in order, with their numbers."""
        parts: list[Iterable[Entry]] = [self.whole, self.span.entries() if self.span is not None else ()]
        parts = [[entry for entry in part if isinstance(entry[1], classes)] for part in parts]
        for kind, thinned in self.thinned.items():
            if issubclass(kinds.KINDS[kind], classes):
                parts.append(thinned.entries())
        return list(heapq.merge(*parts, key=lambda entry: entry[0]))

    def recent(self, cls: type[E], count: int) -> list[E]:
        """Return the newest events of a kind that is thinned, at most 64."""
        # The copy: a thread may draw while another one adds events.
        known = tuple(self._thinned(cls).recent)[-count:]
        return [event for _, event in known if isinstance(event, cls)]

    def sample(self, cls: type[E]) -> list[E]:
        """Return events of a kind that is thinned at equal distances, the newest ones all."""
        return [event for _, event in self._thinned(cls).sample() if isinstance(event, cls)]

    def _thinned(self, cls: type[Event]) -> ThinnedEvents:
        return self.thinned.get(cls.EVENT) or ThinnedEvents()

    def _thin(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.max_step = max(event.step, event.step if self.max_step is None else self.max_step)
        kind = event.EVENT
        if isinstance(event, kinds.Digest):
            # Those of thousands of experts would fill the memory; the fold shows the one of all weights.
            event = kinds.Digest(time=event.time, step=event.step, weights=event.weights, state=event.state)
        if kind not in self.thinned:
            self.thinned[kind] = ThinnedEvents()
        self.thinned[kind].add((self.num_events, event), _RULES.get(kind, last_only))

    def _extend_span(self, event: Event) -> None:
        time = event.time
        if time is None:
            return
        if self.span is None:
            self.span = _Span(self.num_events, self.num_events, time, time)
        self.span.last = self.num_events
        self.span.begin = min(self.span.begin, time)
        self.span.end = max(self.span.end, time)
        self.span.num_steps += isinstance(event, kinds.Step)

    def _close_span(self) -> None:
        if self.span is not None:
            self.whole += self.span.entries()
            self.span = None


def fold_events(recorded: Iterable[Event]) -> RunFold:
    """Return the fold of all events of a run."""
    events = list(recorded)
    limits = limits_of(events)
    fold = RunFold()
    for event, limit in zip(events, limits, strict=True):
        fold.add(event, limit)
    return fold
