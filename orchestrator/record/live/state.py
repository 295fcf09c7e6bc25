"""The state of a run as of its last event, for the terminal view, the screen and for metrics.

``RunState`` is a listener of the event log, or of a follower of it: a view of the fold of the events so far,
so that its memory does not grow with the steps of a run.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import isfinite
from typing import TypeVar, cast

from orchestrator.record.events import kinds
from orchestrator.record.events.effective import MARKERS
from orchestrator.record.events.kinds import Event
from orchestrator.record.events.sessions import of_type, recovery_starts
from orchestrator.record.experts.expert_changes import change_counts, expert_changes
from orchestrator.record.experts.host_balance import even_ratios, imbalance, token_counts
from orchestrator.record.experts.placements import RecordedPlacement, Span, placement_at, placement_spans
from orchestrator.record.summary.fold import RunFold
from orchestrator.record.summary.speed import RECENT_STEPS, Speed, speed_of

E = TypeVar("E", bound=Event)

MAX_NOTABLE = 100
RECENT_LOADS = 10
"""Load events, of ``log_every`` steps each, that the use of the experts is of."""
SILENT_S = 60.0
"""A run without an event for this long, and for ten steps, may have lost its process."""
_SILENT_STEPS = 10
_NOTABLE = (
    *(kinds.Start, kinds.Resume, kinds.Settings, kinds.ExpertChange, kinds.Evaluation, kinds.Checkpoint),
    *(kinds.Upload, kinds.OutOfMemory, kinds.Compile, kinds.CudaGraph, kinds.Warned, kinds.Failure),
    *(kinds.Recovery, kinds.End),
)
"""Events that people want to read one by one."""
LayerUse = dict[int, float]
"""Tokens of each expert, by id, as a multiple of the even share."""


class RunState:
    """The figures of a run that change with its events. They are None until an event has told them."""

    def __init__(self, fold: RunFold | None = None) -> None:
        """``fold`` has the events so far."""
        self.fold = fold or RunFold()
        entries = self.fold.entries()
        self._newest = {event.EVENT: (number, event) for number, event in entries}
        """The newest event of each kind, with its number."""
        times = [event.time for _, event in entries if event.time is not None]
        self.last_time = times[-1] if times else None
        self.experts = ExpertUse(self.fold)

    def __call__(self, event: Event) -> None:
        self.fold.follow(event)
        self._newest[event.EVENT] = (self.fold.num_events, event)
        if event.time is not None:
            self.last_time = event.time

    def newest(self, cls: type[E]) -> E | None:
        """Return the newest event of a kind."""
        return cast("E | None", self._newest.get(cls.EVENT, (0, None))[1])

    @property
    def start(self) -> kinds.Start | None:
        return self.newest(kinds.Start)

    @property
    def end(self) -> kinds.End | None:
        """The end of the run, unless it has started again."""
        return self.newest(kinds.End) if self._number(kinds.End) > self._number(kinds.Start) else None

    @property
    def steps(self) -> list[kinds.Step]:
        """The last steps that count."""
        return self.fold.recent(kinds.Step, RECENT_STEPS)

    @property
    def step(self) -> int:
        """Steps done."""
        done = self.fold.rollbacks.last_step
        # A start says it better until the first step after it: steps may be missing from the record.
        others = max(self._number(kinds.Step), self._number(kinds.Recovery))
        if self.start is not None and (done is None or self._number(kinds.Start) > others):
            return self.start.step or 0
        return done or 0

    @property
    def total_steps(self) -> int | None:
        return (self.start.total_steps or None) if self.start is not None else None

    @property
    def workers(self) -> int | None:
        """The workers since the last start or recovery."""
        events = [self.newest(kinds.Start), self.newest(kinds.Recovery)]
        if self._number(kinds.Recovery) > self._number(kinds.Start):
            events.reverse()
        return next((event.workers for event in events if event is not None and event.workers), None)

    @property
    def began(self) -> float | None:
        """Time of the start by the user; workers that are restarted begin nothing."""
        marks = [event for _, event in self.fold.whole if isinstance(event, MARKERS)]
        restarts = recovery_starts(marks)
        # The recovery that a start belongs to may not be recorded yet.
        restarts |= {
            index + 1
            for index, event in enumerate(marks)
            if isinstance(event, kinds.Failure) and not event.final
        }
        starts = [event for index, event in enumerate(marks) if index not in restarts]
        started = of_type(starts, kinds.Start)
        return started[-1].time if started else None

    @property
    def epoch(self) -> int | None:
        """The epoch of the last step, from 1."""
        epoch = self.steps[-1].epoch if self.steps else None
        return None if epoch is None else epoch + 1

    @property
    def loss(self) -> float | None:
        return self.steps[-1].loss if self.steps else None

    @property
    def is_recovering(self) -> bool:
        """Whether nothing has been trained since a failure that the run survives."""
        failure = self.newest(kinds.Failure)
        others = (kinds.Step, kinds.Recovery, kinds.End)
        is_newest = self._number(kinds.Failure) > max(map(self._number, others))
        return failure is not None and is_newest and not failure.final

    @property
    def status(self) -> str:
        """One word: waiting, running, recovering, completed, stopped, failed."""
        if self.end is not None:
            return self.end.status
        if self.start is None and not self.is_recovering:
            return "waiting"
        return "recovering" if self.is_recovering else "running"

    @property
    def counts(self) -> Counter[str]:
        """Starts, failures, recoveries, lost_steps, checkpoints, and ``expert KIND`` by kind of change.

        They only grow, as Prometheus expects of counters."""
        totals = self.fold.totals
        events = [event for _, event in self.fold.whole]
        recoveries = of_type(events, kinds.Recovery)
        counts = Counter({f"expert {kind}": count for kind, count in totals.expert_changes.items()})
        counts["starts"] = totals.num_starts
        counts["failures"] = len(of_type(events, kinds.Failure))
        counts["recoveries"] = len(recoveries)
        counts["lost_steps"] = sum(event.lost_steps or 0 for event in recoveries)
        counts["checkpoints"] = totals.num_checkpoints
        return counts

    def notable(self) -> list[Event]:
        """Return the newest events that people want to read."""
        return [event for _, event in self.fold.entries(_NOTABLE)][-MAX_NOTABLE:]

    def loss_means(self, num_parts: int) -> list[float]:
        """Return the mean losses over equal parts of the steps, at most ``num_parts``."""
        steps = self.fold.sample(kinds.Step)
        losses = [step.loss for step in steps if step.loss is not None and isfinite(step.loss)]
        num_parts = min(num_parts, len(losses))
        cuts = [index * len(losses) // num_parts for index in range(num_parts + 1)] if num_parts else [0]
        parts = [losses[begin:end] for begin, end in pairwise(cuts)]
        return [sum(part) / len(part) for part in parts]

    def speed(self) -> Speed | None:
        """Return the speed over the recent steps."""
        return speed_of(self.steps)

    def seconds_left(self) -> float | None:
        """Return the time of the steps to come at the recent speed; evaluations come on top."""
        speed = self.speed()
        if speed is None or self.total_steps is None or self.end is not None:
            return None
        return max(0, self.total_steps - self.step) * speed.mean_step_s

    def elapsed(self, now: float) -> float | None:
        """Return the seconds since the start by the user, or until the end."""
        began = self.began
        until = self.last_time if self.end is not None else now
        return None if began is None or until is None else max(0.0, until - began)

    def silence(self, now: float) -> float | None:
        """Return the seconds since the last event if they are many for a run that goes on."""
        if self.last_time is None or self.end is not None:
            return None
        speed = self.speed()
        limit = max(SILENT_S, _SILENT_STEPS * speed.median_step_s if speed else 0.0)
        return now - self.last_time if now - self.last_time > limit else None

    def changes(self) -> dict[str, int]:
        """Return the number of lasting changes of experts by kind, and of undone ones."""
        entries = self.fold.entries((kinds.ExpertChange, *MARKERS))
        return change_counts(expert_changes(event for _, event in entries))

    def _number(self, cls: type[Event]) -> int:
        """Return the number of the newest event of a kind; 0 without one."""
        return self._newest.get(cls.EVENT, (0, None))[0]


class ExpertUse:
    """Recent use of the experts and of their hosts, from the last ``load`` events."""

    def __init__(self, fold: RunFold) -> None:
        self._fold = fold
        self._cached: tuple[object, list[Span]] = (None, [])

    @property
    def placement(self) -> RecordedPlacement | None:
        """The hosts of the experts now; None if the experts have no hosts."""
        spans = self._spans()
        return spans[-1][1] if spans else None

    def layers(self) -> list[LayerUse]:
        """Return the use of the experts that exist now, by layer."""
        counted = [token_counts(event) for event in self._loads()]
        layers: list[LayerUse] = []
        for index, now in enumerate(counted[-1] if counted else ()):
            ratios = even_ratios([counts[index] for counts in counted if index < len(counts)])
            layers.append({expert: ratios.get(expert) or 0.0 for expert in now})
        return layers

    def host_times(self) -> list[float] | None:
        """Return the time of each host's experts as a multiple of the mean."""
        placement = self.placement
        if placement is None:
            return None
        totals = [0.0] * len(placement.hosts)
        for under, event in self._placed_loads():
            if under.hosts != placement.hosts:
                continue
            for times in under.times(token_counts(event)):
                totals = [total + time for total, time in zip(totals, times, strict=True)]
        return placement.relative_times(totals)

    def imbalance(self) -> float | None:
        """Return the time of the slowest host of each layer over the mean time; 1 is balanced."""
        waits = [
            wait
            for under, event in self._placed_loads()
            for wait in under.layer_waits(under.times(token_counts(event)))
        ]
        return imbalance(waits)

    def _loads(self) -> list[kinds.Load]:
        return self._fold.recent(kinds.Load, RECENT_LOADS)

    def _placed_loads(self) -> list[tuple[RecordedPlacement, kinds.Load]]:
        """Return the last loads, each with the placement that it was counted under."""
        spans = self._spans()
        placed = [(placement_at(spans, event.step), event) for event in self._loads()]
        return [(placement, event) for placement, event in placed if placement is not None]

    def _spans(self) -> list[Span]:
        """Return the placements so far."""
        # The newest graph has the sizes of all experts, and a long run has many graphs.
        graphs = self._fold.recent(kinds.ExpertGraph, 1)
        changes = self._fold.entries((kinds.Start, kinds.Placement, kinds.ExpertChange))
        known = ([number for number, _ in changes], graphs)
        if self._cached[0] != known:
            self._cached = (known, placement_spans([*graphs, *(event for _, event in changes)]))
        return self._cached[1]
