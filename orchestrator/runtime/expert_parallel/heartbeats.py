"""The heartbeats of the hosts, as the driver reads them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

from orchestrator.runtime.expert_parallel.stuck import HostHealth

_READ_SECONDS = 0.2
_NUM_INTERVALS = 50
"""Intervals that count as recent."""
_NUM_KNOWN = 8
"""Intervals between signs of progress in steps; until there are so many, the first step counts too."""


def _recent() -> deque[float]:
    return deque(maxlen=_NUM_INTERVALS)


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
    silences: deque[float] = field(default_factory=_recent)
    """Seconds between two heartbeats."""


class Heartbeats:
    """Reads the heartbeats of the members of a generation from the driver's store."""

    def __init__(self, store: Any, clock: Callable[[], float] = monotonic) -> None:
        self._store = store
        self._clock = clock
        self._beats: dict[int, _LastBeat] = {}
        self._generation = -1
        self._read_at = 0.0
        self._intervals: dict[str, deque[float]] = {}
        """Seconds between two signs of progress in a phase, on any host, over all generations."""

    def follow(self, generation: int, members: tuple[int, ...]) -> None:
        """Read the heartbeats of a new group from now on."""
        now = self._clock()
        self._generation = generation
        self._read_at = now
        self._beats = {host_id: _LastBeat(received_at=now, progressed_at=now) for host_id in members}

    def read(self, immediately: bool = False) -> bool:
        """Read the store, unless it was read a moment ago. Return whether it was read."""
        now = self._clock()
        if now - self._read_at < _READ_SECONDS and not immediately:
            return False
        self._read_at = now
        for host_id, beat in self._beats.items():
            key = heartbeat_key(self._generation, host_id)
            if self._store.check([key]):
                self._update(beat, self._store.get(key).decode(), now)
        return True

    def _update(self, beat: _LastBeat, text: str, now: float) -> None:
        # Each heartbeat begins with a counter: the same text means that no new one has come.
        if text == beat.text:
            return
        phase, step, progress, waiting = json.loads(text.partition(" ")[2])
        if beat.text:
            beat.silences.append(now - beat.received_at)
        if progress != beat.progress:
            if beat.text:
                self._intervals.setdefault(beat.phase, _recent()).append(now - beat.progressed_at)
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
                longest_unchanged_s=self._longest_interval_s(beat.phase),
            )
            for host_id, beat in self._beats.items()
        ]

    def _longest_interval_s(self, phase: str) -> float:
        """Return the longest time that a phase has recently gone without progress."""
        intervals = list(self._intervals.get(phase, ()))
        if phase == "step" and len(intervals) < _NUM_KNOWN:
            intervals += self._intervals.get("first step", ())
        return max(intervals, default=0.0)
