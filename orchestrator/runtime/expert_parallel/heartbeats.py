"""The pulses of the hosts as the driver sees them: what each said last, and since when it has said nothing, or nothing new."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

from orchestrator.runtime.expert_parallel.host_worker import beat_key
from orchestrator.runtime.recovery import HostHealth

_LOOK_SECONDS = 0.2


@dataclass
class _LastBeat:
    said: str = ""
    phase: str = "join"
    step: int = 0
    progress: int = -1
    waiting: bool = False
    heard_at: float = 0.0
    moved_at: float = 0.0
    stepped_at: float = 0.0


class Heartbeats:
    """Reads the pulses of the members of an epoch from the store where the hosts leave them."""

    def __init__(self, store: Any, clock: Callable[[], float] = monotonic) -> None:
        self._store, self._clock = store, clock
        self._pulses: dict[int, _LastBeat] = {}
        self._epoch, self._looked = -1, 0.0
        self.slowest_s = 0.0
        """The slowest step that was seen."""

    def follow(self, epoch: int, members: tuple[int, ...]) -> None:
        now = self._clock()
        self._epoch, self._looked = epoch, now
        self._pulses = {seat: _LastBeat(heard_at=now, moved_at=now, stepped_at=now) for seat in members}

    def look(self, at_once: bool = False) -> bool:
        """Read them, if it is time to. Returns whether it was."""
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS and not at_once:
            return False
        self._looked = now
        for seat, pulse in self._pulses.items():
            key = beat_key(self._epoch, seat)
            if self._store.check([key]):
                self._hear(pulse, self._store.get(key).decode(), now)
        return True

    def _hear(self, pulse: _LastBeat, said: str, now: float) -> None:
        if said == pulse.said:
            return
        phase, step, progress, waiting = json.loads(said.partition(" ")[2])
        pulse.said, pulse.heard_at, pulse.phase, pulse.waiting = said, now, phase, waiting
        if progress != pulse.progress:
            pulse.progress, pulse.moved_at = progress, now
        if phase not in ("step", "data"):  # what lies between two steps is none, nor is the first
            pulse.stepped_at = now
        if step != pulse.step:
            if step == pulse.step + 1 and phase == "step":
                self.slowest_s = max(self.slowest_s, now - pulse.stepped_at)
            pulse.step, pulse.stepped_at = step, now

    @property
    def step(self) -> int:
        """Steps that were done by the host that has come furthest."""
        return max((pulse.step for pulse in self._pulses.values()), default=0)

    def signs(self) -> dict[int, float]:
        """When each host was heard of last, as unix seconds."""
        now, clock = time(), self._clock()
        return {seat: now - (clock - pulse.heard_at) for seat, pulse in self._pulses.items()}

    def all(self) -> list[HostHealth]:
        now = self._clock()
        return [
            HostHealth(seat, pulse.phase, pulse.waiting, now - pulse.heard_at, now - pulse.moved_at)
            for seat, pulse in self._pulses.items()
        ]
