"""The fold of a run's events: a bounded number of events, and the sums over all of them.

Summary, report and ``watch`` show the fold, so that neither their time nor their memory grows with the run.
It is made event by event and can be saved and continued (see ``index``)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.record.events import kinds
from orchestrator.record.events.effective import Rollbacks, limits_of
from orchestrator.record.events.kinds import Event, StepEvent
from orchestrator.record.files.reading import Extent
from orchestrator.record.summary.thinning import (
    Entry,
    Reduce,
    ThinnedEvents,
    entry_of,
    extremes,
    largest,
    last_only,
    newest_best,
    process_memory,
    smallest_loss,
    weighted_mean,
)
from orchestrator.record.summary.totals import Totals

_FREQUENT = (StepEvent, kinds.Checkpoint, kinds.Upload, kinds.Warned, kinds.Notice, kinds.SnapshotInterval)
"""Kinds of which a part is kept. All events of the others are, those too that a restart has discarded."""
_RULES: Mapping[str, Reduce] = {
    kinds.Step.EVENT: extremes(smallest_loss, largest("loss"), largest("grad_norm"), largest("seconds")),
    kinds.Evaluation.EVENT: extremes(smallest_loss, largest("loss"), newest_best),
    kinds.Monitor.EVENT: extremes(process_memory),
    kinds.Phases.EVENT: weighted_mean,
    kinds.Exchange.EVENT: weighted_mean,
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


class RunFold:
    """The events of a run up to an extent of its record."""

    def __init__(self) -> None:
        self.extent = Extent()
        self.totals = Totals()
        self.rollbacks = Rollbacks()
        self.max_step: int | None = None
        """The largest step of the thinned events. A restart at an earlier step needs an earlier fold."""
        self._num_events = 0
        self._whole: list[Entry] = []
        self._thinned: dict[str, ThinnedEvents] = {}
        self._span: _Span | None = None

    def add(self, event: Event, limit: float = math.inf) -> int | None:
        """Take the next event. ``limit`` is the lowest step that training continues from after it.

        Returns the step that training continues from if the event itself discards others."""
        self._num_events += 1
        counts = not isinstance(event, StepEvent) or event.step <= limit
        self.totals.add(event, counts)
        if isinstance(event, _FREQUENT):
            if not isinstance(event, kinds.Warned):
                self._extend_span(event)
            if counts:
                self._thin(event)
        else:
            self._close_span()
            self._whole.append((self._num_events, event))
        return self.rollbacks.add(event)

    def events(self) -> list[Event]:
        """Return the kept events in order. Of a short run they are all that count."""
        return [event for _, event in heapq.merge(*self._kept(), key=lambda entry: entry[0])]

    def _kept(self) -> Iterator[Iterable[Entry]]:
        yield self._whole
        yield self._span.entries() if self._span is not None else ()
        for thinned in self._thinned.values():
            yield thinned.entries()

    def _thin(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.max_step = max(event.step, event.step if self.max_step is None else self.max_step)
        kind = event.EVENT
        if kind not in self._thinned:
            self._thinned[kind] = ThinnedEvents(_RULES.get(kind, last_only))
        self._thinned[kind].add((self._num_events, event))

    def _extend_span(self, event: Event) -> None:
        time = event.time
        if time is None:
            return
        if self._span is None:
            self._span = _Span(self._num_events, self._num_events, time, time)
        self._span.last = self._num_events
        self._span.begin = min(self._span.begin, time)
        self._span.end = max(self._span.end, time)
        self._span.num_steps += isinstance(event, kinds.Step)

    def _close_span(self) -> None:
        if self._span is not None:
            self._whole += self._span.entries()
            self._span = None

    def to_json(self) -> dict[str, Any]:
        return {
            "extent": asdict(self.extent),
            "totals": self.totals.to_json(),
            "rollbacks": asdict(self.rollbacks),
            "max_step": self.max_step,
            "num_events": self._num_events,
            "whole": self._whole,
            "thinned": {kind: thinned.to_json() for kind, thinned in self._thinned.items()},
            "span": asdict(self._span) if self._span is not None else None,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunFold:
        """Return the fold that ``to_json`` returned. Any other content raises an exception."""
        fold = cls()
        fold.extent = Extent(**content["extent"])
        fold.totals.load(content["totals"])
        fold.rollbacks = Rollbacks(**content["rollbacks"])
        fold.max_step = content["max_step"]
        fold._num_events = int(content["num_events"])
        fold._whole = list(map(entry_of, content["whole"]))
        for kind, thinned in content["thinned"].items():
            fold._thinned[kind] = ThinnedEvents(_RULES.get(kind, last_only))
            fold._thinned[kind].load(thinned)
        fold._span = _Span(**content["span"]) if content["span"] is not None else None
        return fold


def fold_events(recorded: Iterable[Event]) -> RunFold:
    """Return the fold of all events of a run."""
    events = list(recorded)
    limits = limits_of(events)
    fold = RunFold()
    for event, limit in zip(events, limits, strict=True):
        fold.add(event, limit)
    return fold
