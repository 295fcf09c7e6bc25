"""The heartbeats of the hosts, as the driver reads them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

from orchestrator.runtime.expert_parallel.stuck import HostHealth

_READ_SECONDS = 0.2
_LATE_SECONDS = 1.0
"""A driver that reads this late was itself away: the times it sees are not those of the hosts."""
_NUM_SILENCES = 50
_NUM_STEPS = 5
"""Steps that count as recent."""
_NUM_KNOWN_STEPS = 3
"""Until so many steps are known, the first step counts for them too."""


def heartbeat_key(generation: int, host_id: int) -> str:
    """Return the key in the driver's store under which a host writes its heartbeats."""
    return f"beat/{generation}/{host_id}"


@dataclass
class _LastBeat:
    """The last heartbeat of a host, and when parts of it last changed, by the driver's clock."""

    text: str = ""
    phase: str = "join"
    step: int = 0
    progress: int = -1
    waiting: bool = False
    received_at: float = 0.0
    progressed_at: float = 0.0
    silences: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SILENCES))
    """Seconds between two heartbeats."""


class _Intervals:
    """The longest time between two signs of progress in each of the recent steps."""

    def __init__(self) -> None:
        self._by_step: dict[tuple[int, int], float] = {}
        """By generation and step. By step and not by heartbeat: a step with many quick parts and a slow
        one must not forget the slow one."""

    def add(self, generation: int, step: int, seconds: float) -> None:
        key = generation, step
        self._by_step[key] = max(seconds, self._by_step.get(key, 0.0))
        while len(self._by_step) > _NUM_STEPS:
            self._by_step.pop(next(iter(self._by_step)))

    @property
    def num_steps(self) -> int:
        return len(self._by_step)

    @property
    def longest_s(self) -> float:
        return max(self._by_step.values(), default=0.0)


class Heartbeats:
    """Reads the heartbeats of the members of a generation from the driver's store."""

    def __init__(self, store: Any, clock: Callable[[], float] = monotonic) -> None:
        self._store = store
        self._clock = clock
        self._beats: dict[int, _LastBeat] = {}
        self._generation = -1
        self._previous_generation = -1
        self._read_at = 0.0
        self._work: dict[str, _Intervals] = {}
        """The times between signs of progress of hosts at work, by phase, over all hosts."""
        self._waits: dict[str, _Intervals] = {}
        """The same of hosts that wait for their peers."""

    def follow(self, generation: int, members: tuple[int, ...]) -> None:
        """Read the heartbeats of a new group from now on."""
        now = self._clock()
        self._previous_generation = self._generation
        self._generation = generation
        self._read_at = now
        self._beats = {host_id: _LastBeat(received_at=now, progressed_at=now) for host_id in members}

    def read(self, immediately: bool = False) -> bool:
        """Read the store, unless it was read a moment ago. Return whether it was read."""
        now = self._clock()
        since_last_s = now - self._read_at
        if since_last_s < _READ_SECONDS and not immediately:
            return False
        self._read_at = now
        for host_id, beat in self._beats.items():
            text = self._last_text(self._generation, host_id)
            if text:
                self._update(beat, text, now, is_late=since_last_s > _LATE_SECONDS)
            elif self._previous_generation >= 0:
                self._observe_closing(beat, self._last_text(self._previous_generation, host_id), now)
        return True

    def _last_text(self, generation: int, host_id: int) -> str:
        """Return the last heartbeat of a host in a generation; empty if there is none."""
        key = heartbeat_key(generation, host_id)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _observe_closing(self, beat: _LastBeat, text: str, now: float) -> None:
        """Take the heartbeat of the last generation as a sign of life of a host that joins.

        Before it joins, it closes its part of the last group, and may have a checkpoint to write."""
        if text == beat.text:
            return
        progress = json.loads(text.partition(" ")[2])[2]
        if beat.text and progress != beat.progress:
            beat.progressed_at = now
        beat.progress = progress
        # The first text is from before the regroup: only a change shows that the host lives.
        if beat.text:
            beat.received_at = now
        beat.text = text

    def _update(self, beat: _LastBeat, text: str, now: float, is_late: bool) -> None:
        # Each heartbeat begins with a counter: the same text means that no new one has come.
        if text == beat.text:
            return
        phase, step, progress, waiting = json.loads(text.partition(" ")[2])
        is_measured = beat.phase != "join" and not is_late
        if is_measured:
            beat.silences.append(now - beat.received_at)
        if progress != beat.progress:
            if is_measured:
                intervals = self._waits if beat.waiting else self._work
                of_phase = intervals.setdefault(beat.phase, _Intervals())
                of_phase.add(self._generation, beat.step, now - beat.progressed_at)
            beat.progress = progress
            beat.progressed_at = now
        beat.text = text
        beat.received_at = now
        beat.phase = phase
        beat.step = step
        beat.waiting = waiting

    @property
    def last_step(self) -> int:
        """The number of steps done by the host that is furthest ahead."""
        return max((beat.step for beat in self._beats.values()), default=0)

    def last_seen(self) -> dict[int, float]:
        """Return the time of each host's last heartbeat, in unix seconds."""
        offset = time() - self._clock()
        return {host_id: beat.received_at + offset for host_id, beat in self._beats.items()}

    def health(self) -> list[HostHealth]:
        """Return the state of each member."""
        now = self._clock()
        return [
            HostHealth(
                host_id,
                beat.phase,
                beat.waiting,
                silent_s=now - beat.received_at,
                unchanged_s=now - beat.progressed_at,
                longest_silence_s=max(beat.silences, default=0.0),
                longest_work_s=_longest_s(self._work, beat.phase),
                longest_wait_s=_longest_s(self._waits, beat.phase),
            )
            for host_id, beat in self._beats.items()
        ]


def _longest_s(intervals: Mapping[str, _Intervals], phase: str) -> float:
    """Return the longest time that a phase has recently gone without progress."""
    of_phase = intervals.get(phase, _Intervals())
    if phase == "step" and of_phase.num_steps < _NUM_KNOWN_STEPS:
        first_step = intervals.get("first step", _Intervals())
        return max(of_phase.longest_s, first_step.longest_s)
    return of_phase.longest_s
