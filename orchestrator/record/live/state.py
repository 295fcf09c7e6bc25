"""The state of a run as of its last event, for the terminal view and for metrics.

``RunState`` is a listener of the event log, or of a follower of it. It keeps the last events alone, so that
its memory does not grow with the run.
"""

from __future__ import annotations

from collections import Counter, deque

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event
from orchestrator.record.events.sessions import has_trained
from orchestrator.record.live.expert_use import ExpertUse
from orchestrator.record.live.lasting_changes import LastingChanges
from orchestrator.record.live.loss_curve import LossCurve
from orchestrator.record.summary.fold import RunFold
from orchestrator.record.summary.speed import RECENT_STEPS, Speed, speed_of

MAX_NOTABLE = 100
SILENT_S = 60.0
"""A run without an event for this long, and for ten steps, may have lost its process."""
_SILENT_STEPS = 10
_NOTABLE = (
    *(kinds.Start, kinds.Resume, kinds.Settings, kinds.ExpertChange, kinds.Evaluation, kinds.Checkpoint),
    *(kinds.Upload, kinds.OutOfMemory, kinds.Compile, kinds.CudaGraph, kinds.Warned, kinds.Failure),
    *(kinds.Recovery, kinds.End),
)
"""Events that people want to read one by one."""


class RunState:
    """The figures of a run that change with its events. Fields are None until an event has told them."""

    def __init__(self) -> None:
        self.start: kinds.Start | None = None
        """The newest event of its kind, like those below."""
        self.end: kinds.End | None = None
        self.phases: kinds.Phases | None = None
        self.exchange: kinds.Exchange | None = None
        self.monitor: kinds.Monitor | None = None
        self.evaluation: kinds.Evaluation | None = None
        self.step = 0
        self.workers: int | None = None
        self.began: float | None = None
        """Time of the start by the user; workers that are restarted begin nothing."""
        self.last_time: float | None = None
        self.is_recovering = False
        self.counts: Counter[str] = Counter()
        """Starts, failures, recoveries, lost_steps, checkpoints, and ``expert KIND`` by kind of change.

        They only grow, as Prometheus expects of counters."""
        self.changes = LastingChanges()
        self.steps: deque[kinds.Step] = deque(maxlen=RECENT_STEPS)
        self.losses = LossCurve()
        self.experts = ExpertUse()
        self.notable: deque[Event] = deque(maxlen=MAX_NOTABLE)
        self._has_trained = False
        """Whether there are steps since the last marker, those too that a long record leaves out."""
        self._last_marker: kinds.Start | kinds.Failure | kinds.Recovery | None = None
        """The newest of the events that restart workers."""

    def take(self, fold: RunFold) -> None:
        """Take the events of a run so far, of which a fold has kept a part."""
        for event in fold.events():
            self(event)
        self.counts["checkpoints"] = fold.totals.num_checkpoints

    def __call__(self, event: Event) -> None:
        self.last_time = self.last_time if event.time is None else event.time
        self._has_trained |= has_trained(event)
        match event:
            case kinds.Step():
                self._step(event)
            case kinds.Start():
                self._start(event)
            case kinds.Load():
                self.experts.add_load(event)
            case kinds.Placement() | kinds.ExpertGraph():
                self.experts.add_structure(event)
            case kinds.ExpertChange():
                self._expert(event)
            case kinds.Failure():
                self._failure(event)
            case kinds.Recovery():
                self._recovery(event)
            case kinds.Checkpoint():
                self.counts["checkpoints"] += 1
            case kinds.End():
                self.end = event
                self.is_recovering = False
            case kinds.Phases():
                self.phases = event
            case kinds.Exchange():
                self.exchange = event
            case kinds.Monitor():
                self.monitor = event
            case kinds.Evaluation():
                self.evaluation = event
            case _:
                pass
        if isinstance(event, _NOTABLE):
            self.notable.append(event)

    @property
    def total_steps(self) -> int | None:
        return (self.start.total_steps or None) if self.start is not None else None

    @property
    def epoch(self) -> int | None:
        """The epoch of the last step, from 1."""
        epoch = self.steps[-1].epoch if self.steps else None
        return None if epoch is None else epoch + 1

    @property
    def loss(self) -> float | None:
        return self.steps[-1].loss if self.steps else None

    @property
    def status(self) -> str:
        """One word: waiting, running, recovering, completed, stopped, failed."""
        if self.end is not None:
            return self.end.status
        if self.start is None and not self.is_recovering:
            return "waiting"
        return "recovering" if self.is_recovering else "running"

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
        until = self.last_time if self.end is not None else now
        return None if self.began is None or until is None else max(0.0, until - self.began)

    def silence(self, now: float) -> float | None:
        """Return the seconds since the last event if they are many for a run that goes on."""
        if self.last_time is None or self.end is not None:
            return None
        speed = self.speed()
        limit = max(SILENT_S, _SILENT_STEPS * speed.median_step_s if speed else 0.0)
        return now - self.last_time if now - self.last_time > limit else None

    def _start(self, start: kinds.Start) -> None:
        if not self._belongs_to_recovery(start):
            self.began = start.time
        self.counts["starts"] += 1
        self.changes.begin_attempt()
        self.start = start
        self.end = None
        self.workers = start.workers or self.workers
        self._roll_back(start)
        self.experts.add_structure(start)
        self._mark(start)

    def _belongs_to_recovery(self, start: kinds.Start) -> bool:
        """Whether workers start again after a failure, before or after the ``recovery`` event."""
        marker = self._last_marker
        if isinstance(marker, kinds.Failure):
            return not marker.final
        if not isinstance(marker, kinds.Recovery) or self._has_trained or marker.step != start.step:
            return False
        return not self.steps or self.steps[-1].step <= (marker.step or 0)

    def _step(self, step: kinds.Step) -> None:
        self.step = step.step
        self.steps.append(step)
        self.losses.add(step.step, step.loss)
        self.is_recovering = False

    def _mark(self, event: kinds.Start | kinds.Failure | kinds.Recovery) -> None:
        self._last_marker = event
        self._has_trained = False

    def _expert(self, change: kinds.ExpertChange) -> None:
        self.counts[f"expert {change.change}"] += 1
        self.changes.add(change)
        self.experts.add_structure(change)

    def _failure(self, failure: kinds.Failure) -> None:
        self.counts["failures"] += 1
        self.changes.begin_attempt()
        self.is_recovering = not failure.final
        self._mark(failure)

    def _recovery(self, recovery: kinds.Recovery) -> None:
        self.counts["recoveries"] += 1
        self.counts["lost_steps"] += recovery.lost_steps or 0
        self.workers = recovery.workers or self.workers
        # New processes have rolled back at their start, and may have trained since.
        if not isinstance(self._last_marker, kinds.Start) or self.counts["starts"] == 1:
            self._roll_back(recovery)
        self.is_recovering = False
        self._mark(recovery)

    def _roll_back(self, event: kinds.Start | kinds.Recovery) -> None:
        """Forget what was recorded past the step that training continues from."""
        step = event.step or 0
        self.step = step
        kept = [old for old in self.steps if old.step <= step]
        self.steps = deque(kept, maxlen=RECENT_STEPS)
        self.losses.cut(step)
        self.experts.cut(step)
        self.changes.cut(step)
