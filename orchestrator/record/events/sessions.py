"""The events of a run by kind, by step and by session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import Event, StepEvent

E = TypeVar("E", bound=Event)
S = TypeVar("S", bound=StepEvent)


def of_type(events: Iterable[Event], cls: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, cls)]


def last_of(events: Iterable[Event], cls: type[E]) -> E | None:
    """Return the last event of a kind; None without one."""
    return next(iter(of_type(events, cls)[-1:]), None)


def by_step(events: Iterable[Event], cls: type[S]) -> list[S]:
    """Return the last event of each step, in order of steps."""
    last = {event.step: event for event in events if isinstance(event, cls)}
    return [last[step] for step in sorted(last)]


def recovery_starts(events: Sequence[Event]) -> set[int]:
    """Return the indices of the ``start`` events that belong to a recovery.

    Such a start has the step of the recovery, and no other start lies between the two.
    """
    starts = [index for index, event in enumerate(events) if isinstance(event, kinds.Start)]
    unmatched = [index for index, event in enumerate(events) if isinstance(event, kinds.Recovery)]
    matched: set[int] = set()
    # The first start begins the run. The neighbours of each later one bound the search for its
    # recovery.
    for before, start, after in zip(starts, starts[1:], [*starts[2:], len(events)], strict=False):
        step = events[start].step or 0
        recovery = next(
            (index for index in unmatched if before < index < after and (events[index].step or 0) == step),
            None,
        )
        if recovery is not None:
            unmatched.remove(recovery)
            matched.add(start)
    return matched


def split_sessions(events: Sequence[Event]) -> list[list[Event]]:
    """Split events at each time the user began or resumed the run; restarts of workers split nothing."""
    of_recovery = recovery_starts(events)
    cuts = [
        _session_begin(events, index)
        for index, event in enumerate(events)
        if isinstance(event, kinds.Start) and index and index not in of_recovery
    ]
    return [list(events[begin:end]) for begin, end in pairwise([0, *cuts, len(events)]) if end > begin]


def _session_begin(events: Sequence[Event], start: int) -> int:
    """Return the index of the first event of the session with this ``start`` event.

    A resumed run records the checkpoint that it has read before it starts."""
    begin = start
    for index in range(start - 1, -1, -1):
        if not isinstance(events[index], kinds.Resume | kinds.Warned):
            break
        if isinstance(events[index], kinds.Resume):
            begin = index
    return begin


def last_end(sessions: Sequence[Sequence[Event]]) -> kinds.End | None:
    """Return the ``end`` event that says how a run ended; None if its process was killed.

    A resume that trained nothing does not undo an earlier end: it found nothing left to do, or failed."""
    ends = [last_of(session, kinds.End) for session in sessions]
    while len(ends) > 1 and not any(map(has_trained, sessions[len(ends) - 1])):
        earlier, last = ends[-2:]
        is_completed = last is not None and last.status == "completed"
        if earlier is None or (is_completed and earlier.status != "completed"):
            break
        ends.pop()
    return ends[-1] if ends else None


def has_trained(event: Event) -> bool:
    """Return whether an event is a step, or stands for some that a long record leaves out."""
    return isinstance(event, kinds.Step) or (isinstance(event, kinds.LeftOut) and event.num_steps > 0)
