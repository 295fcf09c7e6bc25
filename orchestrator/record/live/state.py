"""The state of a run as of its last event, for the terminal view and for metrics.

``RunState`` is a listener of the event log, or of a follower of it. It keeps the last events alone, so that
its memory does not grow with the run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from orchestrator.record.experts.expert_changes import parse_change
from orchestrator.record.experts.placements import measurement
from orchestrator.record.files.events import Event
from orchestrator.record.files.scalars import to_float
from orchestrator.record.files.validate import is_valid
from orchestrator.record.live.expert_use import ExpertUse
from orchestrator.record.live.lasting_changes import LastingChanges
from orchestrator.record.live.loss_curve import LossCurve
from orchestrator.record.summary.fold import LEFT_OUT, RunFold
from orchestrator.record.summary.speed import RECENT_STEPS, Speed, speed_of

MAX_NOTABLE = 100
SILENT_S = 60.0
"""A run without an event for this long, and for ten steps, may have lost its process."""
_SILENT_STEPS = 10
_NOTABLE = {
    "start",
    "resume",
    "settings",
    "expert",
    "evaluate",
    "checkpoint",
    "upload",
    "oom",
    "compile",
    "cuda_graph",
    "warning",
    "failure",
    "recovery",
    "end",
}
"""Events that people want to read one by one."""


class RunState:
    """The figures of a run that change with its events. Fields are None until an event has told them."""

    def __init__(self) -> None:
        self.start: Event | None = None
        """The newest event of its kind, like those below."""
        self.end: Event | None = None
        self.phases: Event | None = None
        self.exchange: Event | None = None
        self.monitor: Event | None = None
        self.evaluation: Event | None = None
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
        self.steps: deque[Event] = deque(maxlen=RECENT_STEPS)
        self.losses = LossCurve()
        self.experts = ExpertUse()
        self.notable: deque[Event] = deque(maxlen=MAX_NOTABLE)
        self._has_trained = False
        """Whether there are steps since the last marker, those too that a long record leaves out."""
        self._last_marker: Event | None = None
        """The newest of the events that restart workers: start, failure, recovery."""
        self._handlers: dict[str, Callable[[Event], None]] = {
            "start": self._start,
            "step": self._step,
            "load": self.experts.add_load,
            "placement": self.experts.add_structure,
            "expert": self._expert,
            "expert_graph": self.experts.add_structure,
            "failure": self._failure,
            "recovery": self._recovery,
            "checkpoint": self._checkpoint,
            "end": self._end,
            "phases": lambda event: setattr(self, "phases", event),
            "exchange": lambda event: setattr(self, "exchange", event),
            "monitor": lambda event: setattr(self, "monitor", event),
            "evaluate": lambda event: setattr(self, "evaluation", event),
            LEFT_OUT: self._left_out,
        }

    def take(self, fold: RunFold) -> None:
        """Take the events of a run so far, of which a fold has kept a part."""
        for event in fold.events():
            self(event)
        self.counts["checkpoints"] = fold.totals.num_checkpoints

    def __call__(self, event: Event) -> None:
        # A damaged or forged event must not end the view.
        if not is_valid(event):
            return
        time = measurement(event.get("time"))
        self.last_time = self.last_time if time is None else time
        handler = self._handlers.get(event["event"])
        if handler is not None:
            handler(event)
        if event["event"] in _NOTABLE:
            self.notable.append(event)

    @property
    def total_steps(self) -> int | None:
        total = to_float((self.start or {}).get("total_steps"))
        return int(total) if total and 0 < total < 2**53 else None

    @property
    def epoch(self) -> int | None:
        """The epoch of the last step, from 1."""
        epoch = self.steps[-1].get("epoch") if self.steps else None
        return epoch + 1 if isinstance(epoch, int) else None

    @property
    def loss(self) -> float | None:
        return to_float(self.steps[-1]["loss"]) if self.steps else None

    @property
    def status(self) -> str:
        """One word: waiting, running, recovering, completed, stopped, failed."""
        if self.end is not None:
            return str(self.end["status"])
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

    def _start(self, event: Event) -> None:
        if not self._belongs_to_recovery(event):
            self.began = measurement(event.get("time"))
        self.counts["starts"] += 1
        self.changes.begin_attempt()
        self.start = event
        self.end = None
        self.workers = event.get("workers", self.workers)
        self._roll_back(event)
        self.experts.add_structure(event)
        self._mark(event)

    def _belongs_to_recovery(self, start: Event) -> bool:
        """Whether workers start again after a failure, before or after the ``recovery`` event."""
        marker = self._last_marker or {"event": ""}
        if marker["event"] == "failure":
            return not marker.get("final")
        is_past = bool(self.steps) and self.steps[-1]["step"] > (marker.get("step") or 0)
        has_trained = self._has_trained or is_past
        return marker["event"] == "recovery" and not has_trained and marker.get("step") == start.get("step")

    def _step(self, event: Event) -> None:
        self.step = event["step"]
        self.steps.append(event)
        self.losses.add(event["step"], to_float(event["loss"]))
        self.is_recovering = False
        self._has_trained = True

    def _left_out(self, event: Event) -> None:
        self._has_trained = self._has_trained or bool(event.get("num_steps"))

    def _mark(self, event: Event) -> None:
        self._last_marker = event
        self._has_trained = False

    def _expert(self, event: Event) -> None:
        change = parse_change(event)
        if change is not None:
            self.counts[f"expert {change.kind}"] += 1
            self.changes.add(change)
            self.experts.add_structure(event)

    def _failure(self, event: Event) -> None:
        self.counts["failures"] += 1
        self.changes.begin_attempt()
        self.is_recovering = not event.get("final")
        self._mark(event)

    def _recovery(self, event: Event) -> None:
        self.counts["recoveries"] += 1
        self.counts["lost_steps"] += int(event.get("lost_steps") or 0)
        self.workers = event.get("workers", self.workers)
        # New processes have rolled back at their start, and may have trained since.
        marker = self._last_marker or {"event": ""}
        if marker["event"] != "start" or self.counts["starts"] == 1:
            self._roll_back(event)
        self.is_recovering = False
        self._mark(event)

    def _checkpoint(self, _event: Event) -> None:
        self.counts["checkpoints"] += 1

    def _end(self, event: Event) -> None:
        self.end = event
        self.is_recovering = False

    def _roll_back(self, event: Event) -> None:
        """Forget what was recorded past the step that training continues from."""
        step = int(event.get("step") or 0)
        self.step = step
        kept = [old for old in self.steps if old["step"] <= step]
        self.steps = deque(kept, maxlen=RECENT_STEPS)
        self.losses.cut(step)
        self.experts.cut(step)
        self.changes.cut(step)
